"""Ranks that died or do not answer: what became of them, and whose fault it is."""

from __future__ import annotations

import re

import pytest

from tests.sentinel.test_hang import GROUP, by_rank, issued, line, state, stuck
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.messages import Issued
from tpcompile.sentinel.situation import Lost


def aborted_at(*lines: int) -> Lost:
    """Rank 1, aborted by gloo, with the lines of its stack, outermost first."""
    return Lost(1, "died", stack=tuple(map(line, lines)), aborted=True, is_final=True)


def test_a_dead_rank_is_a_verdict_at_once() -> None:
    states = by_rank(state(0, issued(1, done=False)))
    found = stuck(states, Lost(1, "died", is_final=True), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.gone) == (Cause.KILLED, (1,), (1,))


OPEN = (0, 1)
STUCK, SIZES, CALL = Cause.STUCK_COLLECTIVE, Cause.COLLECTIVE_SIZES, Cause.CALL_COUNT
STEP = (10, 10, 40, 40, 30)  # two of a forward, two of its backward, one of the clipping
SITUATIONS = {
    "two ranks in different collectives, nothing before": ([(10,)], 30, (SIZES, OPEN, 30)),
    "the others did alike, and this one not": ([(10, 20), (10, 20)], 30, (STUCK, (1,), 20)),
    "most ranks are elsewhere": ([(30,), (40,), (40,), (40,)], 30, (STUCK, (0, 1), 30)),
    "a line of its own, where the others repeat theirs": ([(10, 20, 10, 20, 10)] * 2, 30, (STUCK, (1,), 30)),
    "everybody in a different one": ([(10, 20, 10, 20, 10), (10, 20, 10, 20, 77)], 30, (SIZES, (0, 1, 2), 77)),
    "the same line, two ranks": ([(30, 30)], 30, (SIZES, OPEN, 30)),
    "the same line, three ranks": ([(30,), (30,)], 30, (SIZES, (1,), 30)),
    "a loop goes on, or has ended": ([(30, 30, 88)], 30, (SIZES, OPEN, 30)),
    "what was due": ([(*STEP, *STEP, 10, 10, 40, 10)], 40, (STUCK, (0,), 40)),
    "it came early to what was due later": ([(*STEP, *STEP, 10, 10, 40)], 30, (STUCK, (1,), 40)),
    "a step left out by the one that lives": ([(*STEP, *STEP, 10, 10, 10)], 40, (STUCK, (0,), 10)),
}
"""Lines of the collectives of the remaining ranks, the line at which rank 1 aborted -> (cause, ranks, line)."""


@pytest.mark.parametrize("name", SITUATIONS)
def test_of_a_rank_that_aborted_the_collectives_of_the_others_tell(name: str) -> None:
    """gloo aborts the rank that receives more bytes than it expects, which may be the rank that is right."""
    others, aborted, expected = SITUATIONS[name]
    states = [
        state(rank, *(issued(seq, at=at, done=seq < len(lines)) for seq, at in enumerate(lines, start=1)))
        for rank, lines in zip((0, 2, 3, 4), others, strict=False)
    ]
    found = stuck(by_rank(*states), aborted_at(aborted), before={})
    assert found is not None and found.line is not None
    assert (found.cause, found.ranks, found.line.line) == expected
    assert re.search(f"rank 1 .*died .*/home/me/train.py:{aborted}", found.observed)
    assert found.gone == (1,)


def test_split_sizes_have_no_majority() -> None:
    states = by_rank(*(state(rank, issued(1, done=False, op="all_to_all", at=30)) for rank in (0, 2)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.COLLECTIVE_SIZES, (0, 1, 2))


def test_ranks_that_wait_in_one_line_for_asynchronous_collectives_differ_where_these_were_issued() -> None:
    """Rank 1 issued them in the opposite order; which rank aborts is chance."""
    here = state(0, issued(1, at=55), issued(2, at=55, done=False), stack=(line(57),))
    found = stuck(by_rank(here), aborted_at(57), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (0, 1), line(55))


def test_a_rank_that_waits_for_ranks_of_another_domain_tells_nothing_about_the_one_that_aborted() -> None:
    here = state(0, issued(1, done=False, at=30), members={GROUP: (0, 2)})
    found = stuck(by_rank(here), aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (0, 1), line(30))
    assert not found.is_rank_known


def called_from(seq: int, *lines: int, done: bool = True) -> Issued:
    """A collective of a compiled function, with the lines of its callers, outermost first."""
    frames = tuple(map(line, reversed(lines)))
    more = {"stack": frames, "call_line": frames[1], "region": "f", "call": seq}
    return issued(seq, done=done).model_copy(update=more)


def test_in_compiled_code_too_a_rank_that_aborted_where_the_others_are_brought_other_sizes() -> None:
    """Compiled code stands at the first line of its function."""
    compiled = {"region": "f train.py:42"}
    steps = [called_from(number, 90, 67, 42).model_copy(update=compiled) for number in (1, 2, 3)]
    here = state(0, *steps[:2], steps[2].model_copy(update={"is_done": False}))
    found = stuck(by_rank(here), aborted_at(90, 67, 42), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (0, 1), line(67))


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_call_from_a_new_line_may_follow_a_loop_that_ended(num_steps: int) -> None:
    """Rank 1 tried again in halves, or its loop has ended."""
    earlier = [called_from(number, 76, 52, 29) for number in range(1, num_steps + 1)]
    here = state(0, *earlier, called_from(num_steps + 1, 76, 52, 29, done=False))
    found = stuck(by_rank(here), aborted_at(83, 52, 29), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (0, 1), line(83))


def test_a_call_of_the_same_function_from_elsewhere_is_known_as_one() -> None:
    """The innermost line is the same, so that what one of three ranks added is a call of that region."""
    first, second = called_from(1, 76, 52, 29), issued(2, at=20)
    usual = [state(rank, first, second, called_from(3, 76, 52, 29), issued(4, at=20, done=False)) for rank in (0, 2)]
    found = stuck(by_rank(*usual), aborted_at(83, 52, 29), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (1,), line(83))


def test_what_every_step_had_and_the_last_one_not_was_left_out_by_the_remaining_rank() -> None:
    steps = [called_from(1, 110, 74), issued(2, at=111), issued(3, at=116)]
    again = [one.model_copy(update={"seq": one.seq + 3, "call": one.call + 3}) for one in steps]
    here = state(0, *steps, *again, called_from(7, 110, 74), issued(8, at=111), called_from(9, 110, 74, done=False))
    found = stuck(by_rank(here), aborted_at(116), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(116))


def test_of_sizes_of_their_own_a_rank_whose_sizes_fit_has_gone_on() -> None:
    there = issued(2, op="all_to_all", at=30)
    states = by_rank(state(0, issued(1, at=10), there, issued(3, done=False, at=10)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (0, 1), line(30))


@pytest.mark.parametrize(("from_line", "cause"), [(8, Cause.CALL_COUNT), (7, Cause.STUCK_COLLECTIVE)])
def test_a_call_in_the_place_of_what_was_due_killed_a_peer(from_line: int, cause: Cause) -> None:
    def called(seq: int, call: int, at: int) -> Issued:
        return called_from(seq, at, 42).model_copy(update={"call": call})

    steps = [called(1, 1, 7), issued(2, at=30), called(3, 2, 7), issued(4, at=30), called(5, 3, 7)]
    states = by_rank(state(0, *steps, called(6, 4, from_line)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks) == (cause, (0,))


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


def silent(rank: int, host: str = "node-b") -> Lost:
    """A rank that has not answered for too long."""
    return Lost(rank, "silent", host=host, since="21:40:03 UTC (62 s)", is_final=True)


def test_a_host_of_which_no_rank_answers_is_unreachable() -> None:
    waiting = [state(rank, issued(1, done=False)).model_copy(update={"host": "node-a"}) for rank in (0, 1)]
    found = stuck(by_rank(*waiting), silent(2), silent(3))
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.STOPPED_RESPONDING, (2, 3))
    assert re.search("node-b .*unreachable .*21:40:03 UTC", found.observed)


def test_a_host_of_which_a_rank_answers_is_not() -> None:
    hosts = ("node-a", "node-b")
    waiting = [
        state(rank, issued(1, done=False)).model_copy(update={"host": host})
        for rank, host in zip((0, 2), hosts, strict=True)
    ]
    found = stuck(by_rank(*waiting), silent(3))
    assert found is not None
    assert found.ranks == (3,)
    assert "unreachable" not in found.observed
