"""Messages in flight: where each one arrives, also when memory grows between; doubles stand for streams and copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpcompile.by_size import in_flight, workspace
from tpcompile.by_size.in_flight import Slots
from tpcompile.errors import ConfigError

CPU = torch.device("cpu")
STREAM = SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None, record_event=lambda: "event")


class Memory:
    """Its own peer, which sends ten times as much."""

    made: list[Memory]

    def __init__(self, num_bytes: int, **_: Any) -> None:
        self.own = torch.zeros(num_bytes, dtype=torch.uint8)
        self.met: list[int] = []
        self.made.append(self)

    def push(self, x: Tensor, start: int) -> None:
        flat = (x * 10).view(-1).view(torch.uint8)
        self.own[start : start + flat.numel()] = flat

    def meet(self, channel: int) -> None:
        self.met.append(channel)


class NoStream:
    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    Memory.made = []
    monkeypatch.setattr(in_flight.symmetric, "PeerMemory", Memory)
    monkeypatch.setattr(in_flight, "_LEAST_BYTES", 64)
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


def test_a_message_in_flight_is_read_where_it_arrives_when_memory_has_grown(slots: Slots) -> None:
    send(slots, message(1.0))
    send(slots, message(2.0, size=640), 1, meets=False)
    assert len(Memory.made) == 2
    assert slots.receive(0)[:16].unique().item() == 10.0
    assert slots.receive(1)[:640].unique().item() == 20.0


def test_memory_is_made_for_more_slots_and_not_for_smaller_messages(slots: Slots) -> None:
    for num_slots, size, made in ((2, 16, 1), (2, 8, 1), (4, 8, 2), (2, 16, 2)):
        send(slots, message(1.0, size), num_slots=num_slots)
        slots.receive(0)
        assert len(Memory.made) == made


def test_memory_does_not_grow_in_a_capture(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "is_capturing", lambda device: True)
    with pytest.raises(ConfigError, match="an all-reduce of 104 bytes does not fit into the workspace of 0 bytes"):
        send(slots, message(1.0))
