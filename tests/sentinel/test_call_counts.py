"""The calls that ranks made, by the counters of their programs: which rank left one out, and what is no fault."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.call_counts import parted_calls
from tpcompile.sentinel.counter_samples import COLLECTIVES, Counted, Samples

LINE = UserLine(file="train.py", line=7)
GROUP = f"{COLLECTIVES}0 default_pg"
Counter = Callable[[int], int]


def counted(
    counter: Counter, *, calls: range = range(1, 40), name: str = "`step` in main", free: bool = True
) -> Counted:
    samples = {call: {name: counter(call)} for call in calls}
    return Counted(region="step train.py:3", stack=(LINE,), has_collectives=not free, samples=samples)


def compare(*ranks: Counted) -> tuple[tuple[int, ...], str] | None:
    found = parted_calls({rank: {"step": one} for rank, one in enumerate(ranks)})
    if found is None:
        return None
    assert (found.cause, found.line) == (Cause.CALL_COUNT, LINE)
    return found.ranks, found.observed


def usual(call: int) -> int:
    return call


def skips(call: int) -> int:
    """The loop is one iteration further at each call from the eleventh on."""
    return call + (call > 10)


def repeats(call: int) -> int:
    return call - (call > 10)


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_ranks_the_one_whose_loop_went_on_without_a_call_is_named(odd: int) -> None:
    ranks = [counted(skips if rank == odd else usual) for rank in range(2)]
    found = compare(*ranks)
    assert found is not None and found[0] == (odd,)
    assert re.search("left out .*step train.py:3: .*call 11 `step` in main", found[1])
    assert re.search(r"equal \(10\) .*call 10", found[1])


def test_of_three_ranks_the_pair_that_differs_names_the_one(odd: int = 2) -> None:
    found = compare(*(counted(skips if rank == odd else usual) for rank in range(3)))
    assert found is not None and found[0] == (odd,)


def test_ranks_that_are_far_apart_are_compared_at_the_calls_that_both_made() -> None:
    assert compare(counted(usual, calls=range(1, 200)), counted(usual, calls=range(1, 20))) is None
    found = compare(counted(usual, calls=range(1, 200)), counted(skips, calls=range(1, 20)))
    assert found is not None and found[0] == (1,)


def test_loops_that_differ_from_the_start_by_a_constant_are_no_fault() -> None:
    assert compare(counted(usual), counted(lambda call: call + 1)) is None


def test_a_difference_that_was_seen_too_seldom_or_went_away_is_no_fault() -> None:
    assert compare(counted(usual, calls=range(1, 13)), counted(skips, calls=range(1, 13))) is None
    assert compare(counted(usual), counted(lambda call: call + (10 < call < 20))) is None


def test_numbers_that_follow_the_data_are_no_counter() -> None:
    assert compare(counted(lambda call: call * call), counted(lambda call: call * call + (call > 10))) is None
    assert compare(counted(lambda call: 7), counted(lambda call: 7 + (call > 10))) is None


def test_a_new_epoch_starts_the_inner_loop_again_on_all_ranks() -> None:
    assert compare(counted(lambda call: call % 12), counted(lambda call: call % 12)) is None
    found = compare(counted(lambda call: call % 30), counted(lambda call: skips(call) % 30))
    assert found is not None and found[0] == (1,)


def test_more_calls_on_one_rank_are_an_evaluation_unless_the_region_communicates() -> None:
    assert compare(counted(usual), counted(repeats)) is None
    found = compare(counted(usual, free=False), counted(repeats, free=False))
    assert found is not None and found[0] == (1,) and "additional call" in found[1]


def test_collectives_are_a_clock_where_no_loop_is_seen() -> None:
    found = compare(counted(usual, name=GROUP), counted(skips, name=GROUP))
    assert found is not None and found[0] == (1,)
    assert "collectives of 0 default_pg is 11 on rank 0 and 12 on rank 1" in found[1]


def numbers(*, evaluates: bool) -> list[int]:
    """Collectives so far at each call of a rank that sums four gradients a step and meets the others every sixth step.

    It may evaluate alone before, with three calls.
    """
    found, num_issued = [], 0
    for step in range(1, 40):
        found.append(num_issued)
        num_issued += 4
        if step % 6 == 0:
            found += [num_issued] * 3 * evaluates
            num_issued += 1
    return found


def test_a_rank_that_evaluates_alone_comes_to_the_same_barrier_some_calls_later() -> None:
    ranks = [numbers(evaluates=True), numbers(evaluates=False)]
    for newest in range(5, 40):
        calls = range(1, newest + 1)
        pair = [counted(lambda call, own=own: own[call - 1], calls=calls, name=GROUP) for own in ranks]
        assert compare(*pair) is None, newest


@pytest.mark.parametrize("per_step", [2, 3, 4, 6])
def test_one_of_several_calls_of_an_iteration_left_out_is_seen(per_step: int) -> None:
    calls = range(1, 80)
    first = counted(lambda call: (call - 1) // per_step, calls=calls, free=False)
    second = counted(lambda call: (call + (call > 40) - 1) // per_step, calls=calls, free=False)
    found = compare(first, second)
    assert found is not None and found[0] == (1,)
    assert compare(first, first) is None


@pytest.mark.parametrize("per_step", [2, 4])
def test_one_of_several_calls_of_an_iteration_may_follow_the_data_unless_the_region_communicates(per_step: int) -> None:
    calls = range(1, 80)
    first = counted(lambda call: (call - 1) // per_step, calls=calls)
    second = counted(lambda call: (call + (call > 40) - 1) // per_step, calls=calls)
    assert compare(first, second) is None


def test_clocks_are_read_at_the_first_calls_and_then_now_and_then() -> None:
    samples, now_s = Samples(), 0.0
    for call in range(1, 5000):
        now_s += 0.002
        if call == samples.next_call:
            samples.keep(call, {"a": call}, now_s)
    calls = sorted(samples.by_call())
    assert calls[:48] == list(range(1, 49))
    assert all(call % 96 == 0 for call in calls[-8:]) and len(calls) <= 96


def test_a_rank_that_becomes_slow_reads_its_clocks_more_often() -> None:
    samples, now_s = Samples(), 0.0
    for call in range(1, 4000):
        now_s += 0.001 if call < 3000 else 0.5
        if call == samples.next_call:
            samples.keep(call, {"a": call}, now_s)
    calls = sorted(samples.by_call())
    assert calls[-1] - calls[-2] <= 2
