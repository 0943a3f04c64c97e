"""What every rank had issued before each call -> the call in which a rank issued more or fewer."""

from __future__ import annotations

import re

from tests.sentinel.test_hang import GROUP, by_rank, issued, line, state
from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.call_numbers import Calls, uneven_call

STATES = by_rank(state(0, *(issued(number, at=10 + number) for number in range(1, 9))))
"""Of the rank that remains."""


def calls(*numbers: int, phase: str = "C/steady", group: str = GROUP) -> Calls:
    return Calls(phase=phase, begun=tuple({group: number} for number in numbers))


def test_a_rank_that_issued_fewer_than_before_is_named_with_the_collective_it_left_out() -> None:
    found = uneven_call({0: calls(0, 2, 4, 6), 1: calls(0, 2, 3, 5)}, STATES)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.EXTRA_COLLECTIVE, (1,), line(14))
    assert re.search(rf" {GROUP!r} .*call 2 .*C/steady: rank 0 issued 2, rank 1 issued 1", found.observed)


def test_a_rank_that_issued_more_than_before_is_named_although_it_left_no_record() -> None:
    found = uneven_call({0: calls(0, 2, 4), 1: calls(0, 2, 5)}, STATES)
    assert found is not None and (found.ranks, found.line) == ((1,), line(14))
    assert re.search("all issued .*all_reduce #4", found.observed)


def test_in_the_first_call_it_is_the_rank_outside_of_the_majority() -> None:
    found = uneven_call({0: calls(0, 2), 1: calls(0, 1), 2: calls(0, 2)}, {})
    assert found is not None and found.ranks == (1,)


def test_equal_calls_and_calls_that_have_not_ended_on_all_ranks_are_no_finding() -> None:
    assert uneven_call({0: calls(0, 2, 4), 1: calls(0, 2, 4)}, STATES) is None
    assert uneven_call({0: calls(0, 2, 4), 1: calls(0, 2)}, STATES) is None
    assert uneven_call({0: calls(0, 2), 1: calls(0, 1, phase="C/first")}, STATES) is None
    assert uneven_call({0: calls(0, 2, group="1 tp"), 1: calls(0, 1, group="2 tp")}, STATES) is None
    assert uneven_call({}, STATES) is None
