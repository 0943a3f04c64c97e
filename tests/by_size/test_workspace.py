"""The memory of a group: as large as the largest message, kept for graphs that know it, never made in a capture.

The GPU stands behind `torch_api.symmetric` and `torch.cuda`; these are replaced.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpcompile.by_size.op import all_reduce_by_size
from tpcompile.by_size.workspace import LEAST_BYTES, Workspace, workspace_of
from tpcompile.errors import ConfigError
from tpcompile.torch_api import symmetric
from tpcompile.torch_api.kernels import custom_op_function

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GROUP: Any = object()


class Stream:
    """A stream that is its own last event."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def record_event(self) -> Stream:
        return self

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """The memory that was made, as long as something keeps it."""
    found: list[weakref.ref[Tensor]] = []

    def memory(num_bytes: int, *, group: Any, device: torch.device) -> Tensor:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        found.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(symmetric, "memory", memory)
    return found


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of two ranks that communicate nothing."""
    yield started()
    dist.destroy_process_group()


def started() -> str:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return dist.group.WORLD.group_name


def sizes(made: list[weakref.ref[Tensor]]) -> list[int]:
    """Of the memory that is kept."""
    kept = [memory() for memory in made]
    return [memory.numel() for memory in kept if memory is not None]


def test_it_is_made_once_for_all_that_fits_and_grows_to_powers_of_two(made: list[weakref.ref[Tensor]]) -> None:
    space = Workspace(GROUP, CPU)
    first = space.view_like(torch.ones(8, 16, dtype=torch.bfloat16))
    assert (first.shape, first.dtype, first.is_contiguous()) == ((8, 16), torch.bfloat16, True)
    space.view_like(torch.ones(LEAST_BYTES // 4))
    assert sizes(made) == [LEAST_BYTES]
    space.view_like(torch.ones(LEAST_BYTES // 4 + 4))
    assert sizes(made) == [LEAST_BYTES, 2 * LEAST_BYTES]
    assert space.size_bytes == 2 * LEAST_BYTES


def test_memory_that_a_graph_may_know_is_kept_when_it_grows(made: list[weakref.ref[Tensor]]) -> None:
    space = Workspace(GROUP, CPU)
    space.view_like(torch.ones(4))
    space.view_like(torch.ones(LEAST_BYTES))
    gc.collect()
    assert sizes(made) == [LEAST_BYTES, 4 * LEAST_BYTES]
    del space
    gc.collect()
    assert sizes(made) == []


def test_it_does_not_grow_within_a_capture(made: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    space = Workspace(GROUP, GPU)
    space.view_like(torch.ones(4))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    space.view_like(torch.ones(LEAST_BYTES // 4))
    with pytest.raises(ConfigError, match=r"2097152 bytes .* 1048576 bytes"):
        space.view_like(torch.ones(LEAST_BYTES // 2))
    assert sizes(made) == [LEAST_BYTES]


@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_call_on_a_different_stream_waits_for_the_call_before(
    is_capturing: bool, made: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured does not run yet."""
    space = Workspace(GROUP, GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first, second = Stream(), Stream()
    for stream in (first, first, second, second):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        space.view_like(torch.ones(4))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    assert (first.waits, second.waits) == ([], [] if is_capturing else [first])


def test_a_group_has_one_of_its_own_and_a_later_group_of_its_name_a_new_one(group: str) -> None:
    first = workspace_of(group, CPU)
    other = workspace_of(dist.new_group([0, 1]).group_name, CPU)
    assert workspace_of(group, CPU) is first is not other
    dist.destroy_process_group()
    assert started() == group
    assert workspace_of(group, CPU) is not first


ON_GPU = custom_op_function(all_reduce_by_size)
"""What the op runs on a GPU; on a CPU it is the functional all-reduce."""


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_each_algorithm_gets_the_message_in_the_workspace(
    algorithm: str, group: str, made: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric, "one_shot", lambda buffer, x, name: buffer.copy_(x) * 2)
    monkeypatch.setattr(symmetric, "two_shot", lambda buffer, out, name: out.copy_(buffer * 2))
    x = torch.arange(8.0)
    y = ON_GPU(x, f"4096:{algorithm}", group)
    memory = workspace_of(group, CPU).view_like(x)
    assert torch.equal(y, 2 * x) and torch.equal(memory, x)
    assert y.data_ptr() != memory.data_ptr()


def test_what_vectors_cannot_be_read_from_is_copied(
    group: str, made: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(symmetric, "one_shot", lambda buffer, x, name: sent.append(x) or x)
    whole = torch.arange(64, dtype=torch.bfloat16)
    for part in (whole[:32], whole[8:40], whole[1:33], whole[:32].view(4, 8).t()):
        ON_GPU(part, "4096:one_shot", group)
        assert torch.equal(sent[-1], part) and sent[-1].is_contiguous()
    as_it_is, aligned, odd, _ = sent
    assert (as_it_is.data_ptr(), aligned.data_ptr()) == (whole.data_ptr(), whole[8:].data_ptr())
    assert odd.storage_offset() == 0
