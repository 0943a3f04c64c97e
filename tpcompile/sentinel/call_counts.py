"""Counters of ranks at the same call of a region -> the rank that skipped a call, or made an additional one: pure.

At any time, ranks may be some calls apart, so nothing is compared by time. At selected calls of a region a rank records
its counters: the variables of the `for` loops around the call, and the number of its last collective in each group that
all ranks share. At the same call, counters of ranks that run the same program are equal or differ by a constant. If the
difference changes and stays changed, a rank skipped a call or made an additional one: the rank whose counter deviates
from its own rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise

from tpcompile.evidence.groups.by_rank import ByRank, by_name
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.counter_samples import COLLECTIVES, Counted
from tpcompile.sentinel.finding import Finding, first_finding

_STRIDES = (1, 2, 3, 4, 6, 8, 12)
"""Calls per iteration: a loop variable advances at a constant rate only over whole iterations."""
_SEEN = 3
"""Samples before and after a change that must agree on the difference: a single sample may lie between two counts."""
_RATED = 12
"""Samples before a change in which the counter must have one rate, if there are as many: a whole iteration."""
_Table = tuple[int, Mapping[str, Counted]]
"""A rank, and what it recorded by region."""


@dataclass(frozen=True)
class _Reading:
    """One counter of two ranks at one call."""

    call: int
    values: tuple[int, int]

    @property
    def difference(self) -> int:
        return self.values[1] - self.values[0]


@dataclass(frozen=True)
class _Change:
    """Two readings between which the difference of the ranks changed, and stayed changed."""

    before: _Reading
    after: _Reading
    rate: Fraction
    """Increments of both counters per call, before and after."""
    ahead: tuple[Fraction, Fraction]
    """Deviation of each rank's counter from its own rate; nonzero for at least one rank."""

    @property
    def is_of_one_rank(self) -> bool:
        """True when only one rank deviates from its rate."""
        return 0 in self.ahead

    @property
    def is_left_out(self) -> bool:
        """True when one rank's counter advanced without the call and the other rank kept its rate."""
        return min(self.ahead) == 0


def parted_calls(by_rank: Mapping[int, Mapping[str, Counted]]) -> Finding | None:
    """The first region of which a rank skipped a call, or made one more than its neighbour."""
    neighbours = pairwise(ByRank(by_rank).items())
    pairs = (pair for mine, theirs in neighbours for pair in by_name(dict([mine, theirs]), mine[1]))
    return first_finding(_in_region, pairs)


def _in_region(pair: ByRank[Counted]) -> Finding | None:
    names = set[str]().union(*(counted.counters for counted in pair.values()))
    ordered = sorted(names, key=lambda name: (name.startswith(COLLECTIVES), name))
    return first_finding(lambda counter: _by_counter(pair, counter), ordered)


def _by_counter(pair: ByRank[Counted], counter: str) -> Finding | None:
    mine, theirs = pair.map(lambda counted: counted.values_of(counter)).values()
    # The calls at which both ranks recorded it.
    readings = [_Reading(call, (mine[call], theirs[call])) for call in sorted(mine.keys() & theirs.keys())]
    change = _first_change(readings)
    if change is None:
        return None
    is_of_collectives = counter.startswith(COLLECTIVES)
    is_fault = pair.first.has_collectives or _is_fault_without_collectives(change, is_of_collectives=is_of_collectives)
    return _describe(pair, counter, change) if is_fault else None


def _first_change(readings: Sequence[_Reading]) -> _Change | None:
    """The first lasting change over all strides, preferring one in which only one rank deviates from its rate."""
    by_stride = [[reading for reading in readings if reading.call % stride == 0] for stride in _STRIDES]
    found = list(filter(None, map(_first_lasting_change, by_stride)))
    of_one_rank = [change for change in found if change.is_of_one_rank]
    return first(of_one_rank or found)


def _first_lasting_change(readings: Sequence[_Reading]) -> _Change | None:
    """The first change of the difference between two stretches in which both counters advance at one rate."""
    stretches = [list(stretch) for _, stretch in groupby(readings, key=lambda reading: reading.difference)]
    differences = [stretch[0].difference for stretch in stretches]
    for number, (old, new) in enumerate(pairwise(stretches), start=1):
        rate = _rate(old[-_RATED:])
        later = differences[number:]
        if rate and rate == _rate(new[:_SEEN]) and differences[number - 1] not in later:
            return _change(old[-1], new[0], rate)
    return None


def _change(old: _Reading, new: _Reading, rate: Fraction) -> _Change:
    expected = rate * (new.call - old.call)
    steps = zip(old.values, new.values, strict=True)
    first_ahead, second_ahead = (now - then - expected for then, now in steps)
    return _Change(old, new, rate, (first_ahead, second_ahead))


def _rate(readings: Sequence[_Reading]) -> Fraction | None:
    """Increments of the counter per call; None when they vary or there are too few readings."""
    if len(readings) < _SEEN:
        return None
    rates = {Fraction(b.values[0] - a.values[0], b.call - a.call) for a, b in pairwise(readings)}
    return rates.pop() if len(rates) == 1 else None


def _is_fault_without_collectives(change: _Change, *, is_of_collectives: bool) -> bool:
    """True when one rank skipped a region that it calls once per iteration.

    Additional calls on one rank may be an evaluation; of several calls per iteration one may depend on the data, e.g.
    that of an expert without tokens. A rank that has evaluated alone comes to each later barrier at a call with a
    different number, so that the two say nothing of each other any more.
    """
    is_clock_shared = not is_of_collectives or change.before.difference == 0
    return change.is_left_out and abs(change.rate) >= 1 and is_clock_shared


def _describe(pair: ByRank[Counted], counter: str, change: _Change) -> Finding:
    ahead = ByRank(dict(zip(pair, change.ahead, strict=True)))
    shows = ByRank(dict(zip(pair, change.after.values, strict=True)))
    odd = ahead.where(bool).ranks
    what = _what(change, counter) if change.is_of_one_rank else "did not make the same calls"
    says = " and ".join(f"{value} on rank {rank}" for rank, value in shows.items())
    observed = (
        f"{named_ranks(odd)} {what} of {pair.first.region}: at call {change.after.call} {counter} is "
        f"{says}; {_was(change.before)}"
    )
    is_by_number = counter.startswith(COLLECTIVES)
    return Finding(Cause.CALL_COUNT, observed, odd, pair[odd[0]].line, is_by_number=is_by_number)


def _was(reading: _Reading) -> str:
    """Text on the last call before the change, at which the counters were equal or differed by a constant."""
    first_value, second_value = reading.values
    if first_value == second_value:
        return f"it was equal ({first_value}) on both ranks up to call {reading.call}"
    return f"up to call {reading.call} it was {first_value} and {second_value}, with a constant difference"


def _what(change: _Change, counter: str) -> str:
    is_ahead = max(change.ahead) > 0
    if counter.startswith(COLLECTIVES):
        return "issued more collectives per call than before" if is_ahead else "issued fewer collectives per call"
    return "left out a call" if is_ahead else "made one additional call"
