"""Ranks that died or do not answer: what became of them, and whose fault it is."""

from __future__ import annotations

import pytest

from tests.sentinel.test_hang import by_rank, issued, line, state, stuck
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Issued
from tpcompile.sentinel.situation import Lost


def test_a_dead_rank_is_a_verdict_at_once() -> None:
    states = by_rank(state(0, issued(1, done=False)))
    found = stuck(states, Lost(1, "died", is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.gone) == (Cause.KILLED, (1,), (1,))


def test_a_rank_that_aborted_in_a_different_collective_is_named_with_its_line() -> None:
    states = by_rank(state(0, issued(1, done=False, at=10)))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    assert (found.cause, found.line) == (Cause.STUCK_COLLECTIVE, line(30))


def test_a_rank_that_aborted_where_the_others_are_brought_other_sizes() -> None:
    states = by_rank(state(0, issued(1, at=30), issued(2, done=False, at=30)))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (1,), line(30))


@pytest.mark.parametrize(
    ("op", "cause"), [("all_to_all", Cause.COLLECTIVE_SIZES), ("all_reduce", Cause.STUCK_COLLECTIVE)]
)
def test_a_rank_that_aborted_where_the_others_are_through_brought_other_sizes(op: str, cause: Cause) -> None:
    there = issued(2, op=op, at=30)
    states = by_rank(state(0, issued(1, at=10), there, issued(3, done=False, at=10)))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (cause, (1,), line(30))


def test_a_rank_that_died_in_everybodys_collective_because_of_a_new_one_elsewhere() -> None:
    states = by_rank(state(0, issued(1, at=30), issued(2, at=30), issued(3, done=False, at=88)))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(88))


STEP = (10, 10, 20, 20, 30)  # two of a forward, two of its backward, one of the clipping


def aborted_where_rank_0_had_issued(*lines: int) -> Finding:
    states = by_rank(state(0, *(issued(number, at=at) for number, at in enumerate(lines, start=1))))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    return found


def test_a_rank_that_goes_on_with_the_next_step_left_out_what_the_dead_rank_is_in() -> None:
    """The second step is compiled code of its own: its first collective is new, and its call is that of the first."""

    def called(seq: int, call: int, at: int) -> Issued:
        return issued(seq, at=at).model_copy(update={"call_line": line(7), "call": call, "region": "f"})

    new = called(3, 2, 11).model_copy(update={"is_done": False})
    found = stuck(
        by_rank(state(0, called(1, 1, 10), called(2, 1, 10), new)),
        Lost(1, "died", stack=(line(30),), aborted=True, is_final=True),
        before={},
    )
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(30))
    assert "; rank 0 left out the collective there, and issued all_reduce #3" in found.observed


def test_a_step_that_was_left_out_is_distinguished_from_the_end_of_the_first_step() -> None:
    found = aborted_where_rank_0_had_issued(*STEP, *STEP, 10, 10, 10, 10, 20)
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(10))
    assert "#13" in found.observed


def test_a_rank_that_did_as_in_every_step_is_not_blamed_for_its_first_one() -> None:
    assert aborted_where_rank_0_had_issued(*STEP, *STEP, 10, 10, 20).ranks == (1,)


def test_a_rank_that_died_where_all_come_later_has_left_out_what_the_others_are_in() -> None:
    in_a_call = issued(11, done=False).model_copy(update={"call_line": line(7), "call": 3, "region": "f"})
    usual = [issued(number, at=at) for number, at in enumerate([*STEP, *STEP], start=1)]
    states = by_rank(state(0, *usual, in_a_call))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (1,), line(7))


def test_a_rank_that_died_in_a_hook_below_a_usual_line_has_left_out_nothing() -> None:
    def at(seq: int, number: int) -> Issued:
        return issued(seq, at=number).model_copy(update={"stack": (line(number),)})

    in_a_call = at(5, 10).model_copy(update={"call_line": line(7), "call": 3, "region": "f"})
    states = by_rank(state(0, at(1, 10), at(2, 20), at(3, 10), at(4, 20), in_a_call))
    hook = Lost(1, "died", stack=(line(20), line(31)), aborted=True, is_final=True)
    found = stuck(states, hook, before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (1,), line(31))


@pytest.mark.parametrize(("from_line", "cause"), [(8, Cause.CALL_COUNT), (7, Cause.STUCK_COLLECTIVE)])
def test_a_call_from_a_line_of_its_own_that_killed_a_peer_is_a_call_more(from_line: int, cause: Cause) -> None:
    def called(seq: int, call: int, at: int) -> Issued:
        return issued(seq).model_copy(update={"call_line": line(at), "call": call, "region": "f"})

    steps = [called(1, 1, 7), issued(2, at=30), called(3, 2, 7), issued(4, at=30), called(5, 3, 7)]
    states = by_rank(state(0, *steps, called(6, 4, from_line)))
    found = stuck(states, Lost(1, "died", stack=(line(30),), aborted=True, is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (cause, (0,), line(from_line))


def test_the_call_more_is_named_also_where_a_third_rank_raised_in_the_collective_of_the_dead_rank() -> None:
    """Rank 0 made a call more after its second step, and is in a usual call of the third."""

    def called(seq: int, call: int, at: int = 7) -> Issued:
        stack = (line(10), line(at))
        return issued(seq).model_copy(update={"stack": stack, "call_line": line(at), "call": call, "region": "f"})

    def ended(seq: int) -> Issued:
        return issued(seq, at=30)

    usual = [called(1, 1), called(2, 2), ended(3), called(4, 3), called(5, 4), ended(6)]
    ours = state(0, *usual, called(7, 5, at=8), called(8, 6), called(9, 7).model_copy(update={"is_done": False}))
    theirs = state(2, *usual, called(7, 5), called(8, 6), ended(9))
    gone = Lost(1, "died", stack=(line(30),), aborted=True, is_final=True)
    found = stuck(by_rank(ours, theirs), gone, before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (0,), line(8))
    assert "rank 0 issued all_reduce #7" in found.observed


def test_a_rank_that_crashed_in_its_own_code_was_killed_there() -> None:
    states = by_rank(state(0, issued(1, done=False, at=10)))
    found = stuck(states, Lost(1, "died", stack=(line(30),), is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.KILLED, (1,), line(30))


def test_a_silent_rank_gets_time() -> None:
    states = by_rank(state(0, issued(1, done=False)))
    assert stuck(states, Lost(1, "silent")) is None
    found = stuck(states, Lost(1, "silent", is_final=True))
    assert found is not None
    assert found.cause == Cause.STOPPED_RESPONDING
