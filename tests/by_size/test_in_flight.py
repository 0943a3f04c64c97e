"""Messages in flight: where each one arrives, also when memory grows between; doubles stand for streams and copies."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpcompile.by_size import in_flight, workspace
from tpcompile.by_size.in_flight import Slots, heights
from tpcompile.errors import ConfigError

CPU = torch.device("cpu")
QUEUED: list[str] = []
"""What streams are given, and `computed` for each part."""
STREAM = SimpleNamespace(
    wait_stream=lambda stream: QUEUED.append("wait"),
    wait_event=lambda event: QUEUED.append(f"wait_{event}"),
    record_event=lambda: QUEUED.append("record") or "event",
)


class Memory:
    """Its own peer, which sends ten times as much."""

    made: list[Memory]

    def __init__(self, num_bytes: int, **_: Any) -> None:
        self.own = torch.zeros(num_bytes, dtype=torch.uint8)
        self.met: list[int] = []
        self.made.append(self)

    def push(self, x: Tensor, start: int) -> None:
        QUEUED.append("push")
        flat = (x * 10).view(-1).view(torch.uint8)
        self.own[start : start + flat.numel()] = flat

    def meet(self, channel: int) -> None:
        QUEUED.append("meet")
        self.met.append(channel)


class NoStream:
    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    Memory.made = []
    QUEUED.clear()
    monkeypatch.setattr(in_flight.symmetric, "PeerMemory", Memory)
    monkeypatch.setattr(in_flight, "LEAST_BYTES", 64)
    for name, value in {
        "Stream": lambda *_, **__: STREAM,
        "current_stream": lambda _: STREAM,
        "stream": NoStream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return Slots("group", CPU)


def message(value: float, size: int = 16) -> Tensor:
    return torch.full((size,), value)


def send(slots: Slots, x: Tensor, slot: int = 0, num_slots: int = 4, *, meets: bool = True) -> None:
    slots.start(x, [x], slot, num_slots, meets=meets)


def test_each_slot_has_its_own_message_and_the_first_meets_the_peer(slots: Slots) -> None:
    for slot in range(2):
        send(slots, message(slot + 1.0), slot, meets=slot == 0)
    assert [slots.receive(slot)[:16].unique().item() for slot in range(2)] == [10.0, 20.0]
    (memory,) = Memory.made
    assert memory.met == [0, 1, 2]


def test_the_peer_is_met_before_the_first_copy_each_part_is_computed_before_its_own_and_a_receive_waits(
    slots: Slots,
) -> None:
    x = torch.arange(48.0).view(6, 8)

    def parts() -> Iterator[Tensor]:
        for part in x.split([3, 2, 1]):
            QUEUED.append("computed")
            yield part

    slots.start(x, parts(), 1, 4, meets=True)
    assert torch.equal(slots.receive(1)[:48], 10 * x.view(-1))
    assert ["wait", "meet", *(["computed", "wait", "push"] * 3), "meet", "record", "wait_event"] == QUEUED


def test_a_message_in_flight_is_read_where_it_arrives_when_memory_has_grown(slots: Slots) -> None:
    send(slots, message(1.0))
    send(slots, message(2.0, size=640), 1, meets=False)
    assert len(Memory.made) == 2
    assert slots.receive(0)[:16].unique().item() == 10.0
    assert slots.receive(1)[:640].unique().item() == 20.0


def test_a_smaller_message_does_not_reach_into_the_slot_before(slots: Slots) -> None:
    send(slots, message(1.0, size=64))
    send(slots, message(2.0, size=8), 1, meets=False)
    assert [slots.receive(slot)[:size].unique().item() for slot, size in ((0, 64), (1, 8))] == [10.0, 20.0]


def test_a_slot_stays_as_large_when_there_are_more_of_them(slots: Slots) -> None:
    """Or two programs in turn would make memory at each call."""
    for num_slots, size, made in ((2, 640, 1), (4, 8, 2), (2, 640, 2), (4, 8, 2)):
        send(slots, message(1.0, size), num_slots=num_slots)
        slots.receive(0)
        assert len(Memory.made) == made


@pytest.mark.parametrize("is_captured", [False, True])
def test_copies_wait_for_the_stream_of_the_call_before_too(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    """Not in a capture, where nothing runs."""
    waited_for: list[str] = []
    slots._stream = SimpleNamespace(wait_stream=waited_for.append, record_event=lambda: "event")
    monkeypatch.setattr(in_flight, "is_capturing", lambda device: is_captured)
    for stream in ("one", "other"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        waited_for.clear()
        send(slots, message(1.0))
    assert set(waited_for) == ({"other"} if is_captured else {"one", "other"})


def test_memory_is_made_for_more_slots_and_not_for_smaller_messages(slots: Slots) -> None:
    for num_slots, size, made in ((2, 16, 1), (2, 8, 1), (4, 8, 2), (2, 16, 2)):
        send(slots, message(1.0, size), num_slots=num_slots)
        slots.receive(0)
        assert len(Memory.made) == made


def test_memory_does_not_grow_in_a_capture(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "is_capturing", lambda device: True)
    with pytest.raises(ConfigError, match=r"104 bytes .* 0 bytes"):
        send(slots, message(1.0))


def test_parts_of_a_product_are_of_two_tiles_a_multiprocessor_and_the_last_is_less() -> None:
    assert heights(4680, 5120, 132) == [1664, 1664, 1024, 328]
    assert heights(4096, 5120, 132) == [1408, 1408, 896, 384]
    assert heights(300, 1 << 20, 132) == [256, 44]
    assert heights(100, 5120, 132) == [100]


def test_parts_of_any_product_are_all_of_its_rows() -> None:
    for num_rows in (1, 127, 128, 129, 300, 1536, 4680, 75_600):
        for width in (1, 128, 5120, 1 << 20):
            found = heights(num_rows, width, 132)
            assert sum(found) == num_rows and min(found) > 0
            assert not any(size % 128 for size in found[:-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parts_are_the_rows_of_the_product_of_tensors_of_any_layout(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((400, 16), (16, 24)))
    for one in (a, a.t().contiguous().t(), a.repeat(2, 2)[::2, :16]):
        for other in (b, b.t().contiguous().t(), b.repeat(1, 2)[:, ::2]):
            out = one.new_empty(400, 24)
            sizes = []
            for part in in_flight._computed(one, other, out):
                assert torch.equal(part, (one @ other)[sum(sizes) : sum(sizes) + len(part)])
                sizes.append(len(part))
            assert len(sizes) > 1 and torch.equal(out, one @ other)
