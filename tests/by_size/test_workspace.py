"""The memory of a group: as large as the largest message, kept for graphs that know it, never made in a capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpcompile.by_size import op, workspace
from tpcompile.by_size.workspace import LEAST_BYTES, Workspace
from tpcompile.errors import ConfigError
from tpcompile.torch_api import symmetric

CPU = torch.device("cpu")
GROUP: Any = object()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the memory that was made."""
    sizes: list[int] = []

    def memory(num_bytes: int, *, group: Any, device: torch.device) -> Tensor:
        assert group is GROUP
        sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(symmetric, "memory", memory)
    return sizes


def test_it_is_made_once_for_all_that_fits_and_grows_to_powers_of_two(made: list[int]) -> None:
    space = Workspace(GROUP, CPU)
    first = space.view_like(torch.ones(8, 16, dtype=torch.bfloat16))
    assert (first.shape, first.dtype, first.is_contiguous()) == ((8, 16), torch.bfloat16, True)
    space.view_like(torch.ones(LEAST_BYTES // 4))
    assert made == [LEAST_BYTES]
    space.view_like(torch.ones(LEAST_BYTES // 4 + 4))
    assert made == [LEAST_BYTES, 2 * LEAST_BYTES]
    assert space.size_bytes == 2 * LEAST_BYTES


def test_memory_that_a_graph_may_know_is_kept_when_it_grows(made: list[int]) -> None:
    space = Workspace(GROUP, CPU)
    before = space.view_like(torch.ones(4)).data_ptr()
    space.view_like(torch.ones(LEAST_BYTES))
    assert next(memory.data_ptr() for memory in space._made) == before


def test_it_does_not_grow_within_a_capture(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(GROUP, CPU)
    space.view_like(torch.ones(4))
    monkeypatch.setattr(workspace, "is_capturing", lambda device: True)
    space.view_like(torch.ones(LEAST_BYTES // 4))
    with pytest.raises(ConfigError, match=r"2097152 bytes .* 1048576 bytes"):
        space.view_like(torch.ones(LEAST_BYTES // 2))
    assert made == [LEAST_BYTES]


def test_a_group_has_one_of_its_own_and_a_later_group_of_its_name_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[str, Any] = {"a": object(), "b": object()}
    monkeypatch.setattr(workspace, "group_of_name", groups.__getitem__)
    monkeypatch.setattr(workspace, "_OF_GROUPS", {})
    first = workspace.workspace_of("a", CPU)
    assert workspace.workspace_of("a", CPU) is first is not workspace.workspace_of("b", CPU)
    groups["a"] = object()
    assert workspace.workspace_of("a", CPU) is not first


class Stream:
    def __init__(self) -> None:
        self.waits: list[Any] = []

    def record_event(self) -> Stream:
        return self

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


def test_a_call_on_a_different_stream_waits_for_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(GROUP, torch.device("cuda", 0))
    first, second = Stream(), Stream()
    monkeypatch.setattr(workspace, "is_capturing", lambda device: False)
    for stream in (first, first, second, second):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        space._take_turn()
    assert (first.waits, second.waits) == ([], [first])


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_each_algorithm_gets_the_message_in_the_workspace(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(8)
    monkeypatch.setattr(op, "workspace_of", lambda name, device: SimpleNamespace(view_like=lambda x: memory))
    monkeypatch.setattr(symmetric, "one_shot", lambda buffer, x, name: buffer.copy_(x) * 2)
    monkeypatch.setattr(symmetric, "two_shot", lambda buffer, out, name: out.copy_(buffer * 2))
    x = torch.arange(8.0)
    y = op._through_workspace(x, algorithm, "group")
    assert torch.equal(y, 2 * x) and torch.equal(memory, x)
    assert y.data_ptr() != memory.data_ptr()


def test_what_vectors_cannot_be_read_from_is_copied() -> None:
    whole = torch.arange(64, dtype=torch.bfloat16)
    assert op._aligned(whole) is whole
    assert op._aligned(whole[8:]).data_ptr() == whole[8:].data_ptr()
    odd = op._aligned(whole[1:33])
    assert odd.storage_offset() == 0 and torch.equal(odd, whole[1:33])
    assert op._aligned(whole.view(8, 8).t()).is_contiguous()
