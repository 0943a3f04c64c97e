"""A stream of one rank: its end, and what its numbers count; it survives JSON."""

from __future__ import annotations

import pytest

from tests.evidence.timeline.written import stream
from tpcompile.evidence.timeline.stream import How, Kind, Stream

GROUPS = {"world": (0, 1)}


def ending(text: str, how: How) -> tuple[str, int] | None:
    """Name and line of the end."""
    end = stream(0, text, GROUPS, how).end
    return None if end is None else (end.name, end.stack[-1].line if end.stack else 0)


@pytest.mark.parametrize("how", [How.FINISHED, How.RAISED, How.EXITED, How.KILLED, How.ABORTED])
def test_a_rank_that_is_gone_has_an_end(how: How) -> None:
    assert ending("i5 a10", how) == (str(how), 0)


@pytest.mark.parametrize("how", [How.RUNNING, How.WAITING])
def test_a_rank_that_may_go_on_has_none(how: How) -> None:
    assert ending("i5 a10", how) is None


@pytest.mark.parametrize("how", [How.RAISED, How.ABORTED])
def test_an_end_inside_a_collective_is_a_consequence(how: How) -> None:
    assert ending("i5 a10*", how) is None and ending("i5 a10* e6", how) is None


def test_a_kill_inside_a_collective_is_none() -> None:
    assert ending("i5 a10*", How.KILLED) == ("killed", 0)


def test_a_recorded_end_has_its_line() -> None:
    assert ending("i5 a10 e6.30", How.RAISED) == ("", 30)


def test_numbers_count_by_group_region_peer_and_loop() -> None:
    events = stream(0, "i5 i7 a10 c8=f >1@11", GROUPS).events
    assert len({event.sequence for event in events}) == 5
    assert events[0].sequence != events[1].sequence
    assert events[-1].sequence == (Kind.SEND, "1")


def test_json_gives_the_same_stream() -> None:
    one = stream(1, "i5 c8=f:0 a8.40:4x4* <0@3", GROUPS, How.WAITING, {"world": 7})
    assert Stream.model_validate_json(one.to_json()) == one
