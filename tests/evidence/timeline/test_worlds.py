"""Drawn programs with a fault on one rank: the rank and the line are found, and healthy ones have no parting.

Seeds are fresh in each run and are printed: nothing is tuned to them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from math import sqrt

import pytest

from tests.evidence.timeline.world import World, faulty_world, healthy_world
from tpcompile.evidence.timeline import usual
from tpcompile.evidence.timeline.align import align
from tpcompile.evidence.timeline.stream import How, Stream

_NUM_WORLDS = 400
_LEAST_RIGHT = 0.85
"""Rank and line, without the executed lines."""
_MOST_WRONG = 0.02
"""A rank blamed that did nothing wrong."""


def drawn_seeds() -> range:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {first}")
    return range(first, first + _NUM_WORLDS)


def graded(world: World) -> tuple[str, bool]:
    """How well the rank was named: right, open, or wrong; whether the line is right."""
    parting = align(world.streams)
    if parting is None or world.odd in parting.odd or not parting.odd:
        is_right = parting is not None and parting.odd == (world.odd,)
    else:
        return "wrong", False
    line = parting.line.line if parting and parting.line else 0
    return "right" if is_right else "open", line in world.lines


def shares(worlds: Iterable[World]) -> tuple[float, float, str]:
    """The shares of worlds with rank and line right, and with a wrong rank; how many of each kind were not right."""
    right = wrong = num = 0
    missed = Counter[str]()
    for world in worlds:
        rank, is_line = graded(world)
        num += 1
        wrong += rank == "wrong"
        is_right = rank == "right" and is_line
        right += is_right
        missed[world.fault] += not is_right
    text = f"of {num}: right {right / num:.3f}, wrong rank {wrong / num:.3f}, not right {dict(missed.most_common())}"
    print(text)
    return right / num, wrong / num, text


def chance(share: float) -> float:
    """Three standard deviations of a share that is measured on so many worlds."""
    return 3 * sqrt(share * (1 - share) / _NUM_WORLDS)


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    """Worlds whose streams reach back to the parting."""
    drawn = map(faulty_world, drawn_seeds())
    return [world for world in drawn if world.parted_at > 0]


@pytest.mark.slow
def test_rank_and_line_are_found(worlds: list[World]) -> None:
    right, wrong, text = shares(worlds)
    assert right >= _LEAST_RIGHT, text
    assert wrong <= _MOST_WRONG + chance(_MOST_WRONG), text


@pytest.mark.slow
def test_without_the_common_past_they_are_not(worlds: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer of the same worlds: the share itself is that of a draw."""
    with_past, _, _ = shares(worlds)
    monkeypatch.setattr(usual, "due_after", lambda _: set())
    right, _, text = shares(worlds)
    assert right < with_past - 0.05, text


@pytest.mark.slow
def test_a_healthy_job_has_no_parting_at_any_time() -> None:
    parted = [seed for seed in drawn_seeds() if align(healthy_world(seed).streams) is not None]
    assert parted == []


@pytest.mark.slow
def test_executed_lines_lead_to_every_event(worlds: list[World]) -> None:
    for world in worlds[:100]:
        for rank, stream in world.streams.items():
            lines = [world.flows[rank][mark - 1][1] for mark in world.marks[rank]]
            places = [event.place[-2 if event.region else -1][1] for event in stream.events]
            assert lines == places


@pytest.mark.slow
def test_damaged_streams_are_compared_as_far_as_they_go(worlds: list[World]) -> None:
    draw = random.Random(worlds[0].seed)
    for world in worlds[:200]:
        streams = {rank: damaged(stream, draw) for rank, stream in world.streams.items() if draw.random() < 0.9}
        parting = align(streams)
        if parting is not None:
            assert set(parting.odd) <= set(parting.starts) <= set(streams)
            assert parting.line is None or parting.line.line > 0


def damaged(stream: Stream, draw: random.Random) -> Stream:
    """The stream with events left out, numbers that are not known, no stacks, or a different end."""
    first, last = sorted(draw.randrange(len(stream.events) + 1) for _ in range(2))
    kept = [event for event in stream.events[first:last] if draw.random() < 0.98]
    lost = {"number": 0, "stack": (), "is_done": False, "content": {}, "region": ""}
    events = []
    for event in kept:
        name = draw.choice(list(lost))
        events.append(event.model_copy(update={name: lost[name]}) if draw.random() < 0.05 else event)
    changes = {"events": tuple(events), "is_whole": draw.random() < 0.3, "how": draw.choice(list(How))}
    return stream.model_copy(update=changes)
