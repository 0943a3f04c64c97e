"""Clocks of ranks at the same call of a region -> the rank that left out a call, or made one more: pure.

Ranks run apart by some calls at any instant, so nothing is compared by time. At some calls of a region a rank writes
down its clocks: the variables of the `for` loops around the call, and the number of its last collective in each group
that all ranks share. At one call these are equal on ranks that run the same program, or differ by a constant, however
far apart the ranks are. A difference that changes and stays changed is a call that one rank alone left out or made; the
rank whose clock left its own rate is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.marks import COLLECTIVES, Counted

_STRIDES = (1, 2, 3, 4, 6, 8, 12)
"""Calls of one iteration: a loop has gone on by the same number only from one whole iteration to the next."""
_SEEN = 3
"""Marks before and after a change of the difference that must agree on it: one may lie between two counts."""
_RATED = 12
"""Marks before it in which the clock must run at one rate, where there are so many: a whole iteration."""


@dataclass(frozen=True)
class _Reading:
    """One clock of two ranks at one call."""

    call: int
    values: tuple[int, int]

    @property
    def difference(self) -> int:
        return self.values[1] - self.values[0]


@dataclass(frozen=True)
class _Change:
    """Between two readings the difference of the ranks changed, and stayed changed."""

    before: _Reading
    after: _Reading
    rate: Fraction
    """Ticks of both clocks per call, before and after."""
    ahead: tuple[Fraction, Fraction]
    """By how much each rank's clock left its own rate."""


def parted_calls(by_rank: Mapping[int, Mapping[str, Counted]]) -> Finding | None:
    """The first region of which a rank left out a call, or made one more than its neighbour."""
    for first, second in pairwise(sorted(by_rank)):
        theirs = by_rank[second]
        for region, mine in by_rank[first].items():
            found = _in_region((first, second), mine, theirs[region]) if region in theirs else None
            if found is not None:
                return found
    return None


def _in_region(ranks: tuple[int, int], mine: Counted, theirs: Counted) -> Finding | None:
    calls = sorted(mine.marks.keys() & theirs.marks.keys())
    clocks = {clock for call in calls for clock in mine.marks[call].keys() & theirs.marks[call].keys()}
    for clock in sorted(clocks, key=lambda name: (name.startswith(COLLECTIVES), name)):
        change = _first_change(_readings(clock, calls, mine, theirs))
        if change is not None and (mine.has_collectives or _is_fault_without_collectives(change)):
            return _describe(ranks, mine, theirs, clock, change)
    return None


def _first_change(readings: Sequence[_Reading]) -> _Change | None:
    found = []
    for stride in _STRIDES:
        at_whole = [reading for reading in readings if reading.call % stride == 0]
        found += list(_changes(at_whole))[:1]
    of_one_rank = [change for change in found if 0 in change.ahead]
    return next(iter(of_one_rank or found), None)


def _readings(clock: str, calls: Sequence[int], mine: Counted, theirs: Counted) -> list[_Reading]:
    found = []
    for call in calls:
        values = mine.marks[call].get(clock), theirs.marks[call].get(clock)
        if values[0] is not None and values[1] is not None:
            found.append(_Reading(call, (values[0], values[1])))
    return found


def _changes(readings: Sequence[_Reading]) -> Iterator[_Change]:
    """Changes of the difference between two stretches in which both clocks run at one rate."""
    stretches = [list(stretch) for _, stretch in groupby(readings, key=lambda reading: reading.difference)]
    for number, (old, new) in enumerate(pairwise(stretches)):
        later = {stretch[0].difference for stretch in stretches[number + 1 :]}
        rate = _rate(old[-_RATED:])
        returns = old[0].difference in later
        if rate and rate == _rate(new[:_SEEN]) and not returns:
            expected = rate * (new[0].call - old[-1].call)
            steps = (now - then for now, then in zip(new[0].values, old[-1].values, strict=True))
            first, second = (step - expected for step in steps)
            yield _Change(old[-1], new[0], rate, (first, second))


def _rate(readings: Sequence[_Reading]) -> Fraction | None:
    """Ticks of the clock per call, None where it is not always the same or too little was seen."""
    if len(readings) < _SEEN:
        return None
    rates = {Fraction(b.values[0] - a.values[0], b.call - a.call) for a, b in pairwise(readings)}
    return rates.pop() if len(rates) == 1 else None


def _is_fault_without_collectives(change: _Change) -> bool:
    """True where one rank left out what it calls once per iteration.

    More calls on one rank may be an evaluation; of several calls per iteration one may follow the data, as that of an
    expert without tokens.
    """
    is_left_out = sorted(ahead > 0 for ahead in change.ahead) == [False, True] and 0 in change.ahead
    return is_left_out and abs(change.rate) >= 1


def _describe(ranks: tuple[int, int], mine: Counted, theirs: Counted, clock: str, change: _Change) -> Finding:
    odd = tuple(rank for rank, ahead in zip(ranks, change.ahead, strict=True) if ahead)
    line = theirs.line if odd == ranks[1:] else mine.line
    says = " and ".join(f"{value} on rank {rank}" for rank, value in zip(ranks, change.after.values, strict=True))
    then = " and ".join(str(value) for value in dict.fromkeys(change.before.values))
    what = _what(change, clock) if len(odd) == 1 else "do not make the same calls"
    observed = (
        f"rank {ranks_text(odd or ranks)} {what} of {mine.region}: at call {change.after.call} {clock} is {says}; "
        f"up to call {change.before.call}, where it was {then}, the ranks were in step"
    )
    is_by_number = clock.startswith(COLLECTIVES)
    return Finding(Cause.CALL_COUNT, observed, odd or ranks, line, is_by_number=is_by_number)


def _what(change: _Change, clock: str) -> str:
    is_ahead = max(change.ahead) > 0
    if clock.startswith(COLLECTIVES):
        return "issued more collectives per call than before" if is_ahead else "issued fewer collectives per call"
    return "left out a call" if is_ahead else "made one call more"
