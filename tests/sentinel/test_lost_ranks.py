"""Ranks that died or do not answer: what became of them, and whose fault it is."""

from __future__ import annotations

import pytest

from tests.sentinel.test_hang import GROUP, by_rank, issued, line, state, stuck
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding
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


def test_of_two_ranks_in_different_collectives_the_one_that_aborted_is_not_blamed_for_that() -> None:
    states = by_rank(state(0, issued(1, done=False, at=10)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0, 1), line(10))
    assert "rank 1 has died in /home/me/train.py:30" in found.observed
    assert "rank 0 issued all_reduce #1" in found.observed and "left out" not in found.observed


def test_of_more_ranks_the_one_that_did_not_what_the_others_did_is_blamed() -> None:
    states = by_rank(*(state(rank, issued(1, at=10), issued(2, done=False, at=20)) for rank in (0, 2)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (1,), line(30))


def test_ranks_in_a_collective_of_unlike_sizes_differ_unless_most_have_the_same() -> None:
    one, two = (state(rank, issued(1, done=False, at=30)) for rank in (0, 2))
    wide = issued(1, done=False, at=30).model_copy(update={"sizes": "8x4"})
    for remaining, odd in (((one,), (0, 1)), ((one, two), (1,)), ((one, state(2, wide)), (0, 1, 2))):
        found = stuck(by_rank(*remaining), aborted_at(30), before={})
        assert found is not None
        assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, odd, line(30))


def test_where_half_of_the_remaining_ranks_are_elsewhere_all_differ() -> None:
    there = state(0, issued(1, done=False, at=30))
    states = by_rank(there, *(state(rank, issued(1, done=False, at=40)) for rank in (2, 3, 4)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.STUCK_COLLECTIVE, (1, 2, 3, 4))


def test_a_line_of_its_own_is_added_only_where_all_others_go_on_with_their_steps() -> None:
    steps = [issued(number, at=at) for number, at in enumerate([10, 20, 10, 20], start=1)]
    goes_on = state(0, *steps, issued(5, done=False, at=10))
    for other, odd in ((goes_on, (1,)), (state(2, issued(5, done=False, at=77)), (0, 1, 2))):
        states = by_rank(goes_on, other.model_copy(update={"rank": 2}))
        found = stuck(states, aborted_at(30), before={})
        assert found is not None and found.ranks == odd


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
    assert "order" in found.observed


def test_a_rank_that_waits_for_ranks_of_another_domain_tells_nothing_about_the_one_that_aborted() -> None:
    here = state(0, issued(1, done=False, at=30), members={GROUP: (0, 2)})
    found = stuck(by_rank(here), aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.KILLED, (1,), line(30))
    assert "ranks of other domains" in found.observed


def called_from(seq: int, *lines: int, done: bool = True) -> Issued:
    """A collective of a compiled function, with the lines of its callers, outermost first."""
    frames = tuple(map(line, reversed(lines)))
    more = {"stack": frames, "call_line": frames[1], "region": "f", "call": seq}
    return issued(seq, done=done).model_copy(update=more)


@pytest.mark.parametrize("first_request", [(64, 67, 67), (64, 67, 67, 67, 67)])
@pytest.mark.parametrize("second_request", [(64,), (64, 67, 67)])
@pytest.mark.parametrize("is_survivor_through", [True, False])
def test_a_loop_that_ends_on_one_rank_earlier_shows_not_which_rank_is_right(
    first_request: tuple[int, ...], second_request: tuple[int, ...], is_survivor_through: bool
) -> None:
    """64 is the first call of a request, 67 that of the loop: both are usual after one of the loop."""
    lines = (*first_request, *second_request)
    goes_on, ended = 67, 64
    theirs, mine = (ended, goes_on) if is_survivor_through else (goes_on, ended)
    earlier = [called_from(number, 90, at, 42) for number, at in enumerate(lines, start=1)]
    here = state(0, *earlier, called_from(len(lines) + 1, 90, theirs, 42, done=False))
    found = stuck(by_rank(here), aborted_at(90, mine, 42), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (0, 1), line(67))


@pytest.mark.parametrize(("num_steps", "odd"), [(0, (0, 1)), (1, (0, 1)), (2, (1,)), (3, (1,))])
def test_a_call_that_no_other_rank_makes_is_added_where_the_others_go_on_with_equal_steps(
    num_steps: int, odd: tuple[int, ...]
) -> None:
    """Rank 1 tried again in halves."""
    earlier = [called_from(number, 76, 52, 29) for number in range(1, num_steps + 1)]
    here = state(0, *earlier, called_from(num_steps + 1, 76, 52, 29, done=False))
    found = stuck(by_rank(here), aborted_at(83, 52, 29), before={})
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.CALL_COUNT, odd)
    assert "left out" not in found.observed
    if num_steps:
        assert found.line == line(83)
    if len(odd) == 1:
        assert "from /home/me/train.py:83 in step, from which no other rank issues a collective" in found.observed
    else:
        calls = "made at /home/me/train.py:83 in step on rank 1 and at /home/me/train.py:76 in step on rank 0"
        assert calls in found.observed


def test_what_every_step_had_and_the_last_one_not_was_left_out_by_the_remaining_rank() -> None:
    steps = [called_from(1, 110, 74), issued(2, at=111), issued(3, at=116)]
    again = [one.model_copy(update={"seq": one.seq + 3, "call": one.call + 3}) for one in steps]
    here = state(0, *steps, *again, called_from(7, 110, 74), issued(8, at=111), called_from(9, 110, 74, done=False))
    found = stuck(by_rank(here), aborted_at(116), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(116))
    assert "rank 0 left out the collective there, which it issued in earlier steps" in found.observed


def test_a_rank_that_aborted_where_the_others_are_brought_other_sizes() -> None:
    states = by_rank(state(0, issued(1, at=30), issued(2, done=False, at=30)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (0, 1), line(30))


@pytest.mark.parametrize(
    ("op", "cause"), [("all_to_all", Cause.COLLECTIVE_SIZES), ("all_reduce", Cause.STUCK_COLLECTIVE)]
)
def test_ranks_of_which_one_is_through_brought_other_sizes(op: str, cause: Cause) -> None:
    there = issued(2, op=op, at=30)
    states = by_rank(state(0, issued(1, at=10), there, issued(3, done=False, at=10)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (cause, (0, 1), line(30))


def test_a_rank_that_died_in_everybodys_collective_because_of_a_new_one_elsewhere() -> None:
    states = by_rank(state(0, issued(1, at=30), issued(2, at=30), issued(3, done=False, at=88)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(88))


STEP = (10, 10, 20, 20, 30)  # two of a forward, two of its backward, one of the clipping


def aborted_where_rank_0_had_issued(*lines: int) -> Finding:
    states = by_rank(state(0, *(issued(number, at=at) for number, at in enumerate(lines, start=1))))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    return found


def test_a_rank_that_goes_on_with_its_second_step_may_be_right() -> None:
    """The second step is compiled code of its own: its first collective is new, and its call is that of the first."""

    def called(seq: int, call: int, at: int) -> Issued:
        return issued(seq, at=at).model_copy(update={"call_line": line(7), "call": call, "region": "f"})

    new = called(3, 2, 11).model_copy(update={"is_done": False})
    found = stuck(
        by_rank(state(0, called(1, 1, 10), called(2, 1, 10), new)),
        aborted_at(30),
        before={},
    )
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0, 1), line(30))
    assert "; rank 0 issued all_reduce #3" in found.observed


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
    found = stuck(states, aborted_at(30), before={})
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


@pytest.mark.parametrize(("from_line", "cause", "at"), [(8, Cause.CALL_COUNT, 8), (7, Cause.STUCK_COLLECTIVE, 30)])
def test_a_call_from_a_line_of_its_own_that_killed_a_peer_is_a_call_more(from_line: int, cause: Cause, at: int) -> None:
    def called(seq: int, call: int, at: int) -> Issued:
        return issued(seq).model_copy(update={"call_line": line(at), "call": call, "region": "f"})

    steps = [called(1, 1, 7), issued(2, at=30), called(3, 2, 7), issued(4, at=30), called(5, 3, 7)]
    states = by_rank(state(0, *steps, called(6, 4, from_line)))
    found = stuck(states, aborted_at(30), before={})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (cause, (0,), line(at))


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
    gone = aborted_at(30)
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
