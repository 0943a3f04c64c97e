"""Numbers of the last collectives before every call of a phase, by rank -> the call in which they part: pure.

A rank that aborts in a collective leaves no record of what it had issued; these numbers it has published before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tpcompile.evidence.groups.by_rank import ByRank, entry, itself
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.bounds import Number
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.messages import Issued, RankState


class Calls(Frozen):
    """The calls of one rank in a phase."""

    phase: str
    begun: tuple[dict[str, Number], ...] = ()
    """Process group -> number of the last collective, for each call when it began."""

    def issued(self, call: int) -> Mapping[str, int]:
        """Group -> collectives of that call, counted from 0; empty until the next call has begun."""
        if call + 1 >= len(self.begun):
            return {}
        before, after = self.begun[call : call + 2]
        return {group: after[group] - number for group, number in before.items() if group in after}


def uneven_call(calls: Mapping[int, Calls], states: Mapping[int, RankState]) -> Finding | None:
    """The first call in which ranks issued different numbers of collectives of one group."""
    phases = {one.phase for one in calls.values()}
    if len(phases) != 1:
        return None
    return first_finding(lambda found: found.finding(states), _uneven(ByRank(calls)))


def _uneven(calls: ByRank[Calls]) -> Iterator[_Uneven]:
    for call in range(max(len(one.begun) for one in calls.values())):
        tables = {rank: one.issued(call) for rank, one in calls.items()}
        for group in sorted(set[str]().union(*tables.values())):
            counts = entry(tables, group)
            if counts.differ():
                yield _Uneven(calls, call, group, counts)


class _Uneven:
    def __init__(self, calls: ByRank[Calls], call: int, group: str, counts: ByRank[int]) -> None:
        self._calls, self._call, self._group, self._counts = calls, call, group, counts

    def finding(self, states: Mapping[int, RankState]) -> Finding:
        """The finding: it blames ranks whose number changed from the call before, or those outside a majority."""
        counts, call = self._counts, self._call
        odd, is_known = (changed, True) if (changed := self._changed()) else counts.blamed(itself)
        says = ", ".join(f"{named_ranks(ranks)} issued {count}" for ranks, count in counts.sides())
        observed = f"collectives of group {self._group!r} in call {call + 1} of phase {self._calls.first.phase}: {says}"
        fewest = min(counts.values())
        more, fewer = counts.where(lambda count: count > fewest), counts.where(lambda count: count == fewest)
        alone = self._numbered(fewest + 1, more.ranks, states)
        shown = alone or self._numbered(fewest, fewer.ranks, states)
        if shown is None:
            return Finding(Cause.EXTRA_COLLECTIVE, observed, odd, is_rank_known=is_known, is_by_past=bool(changed))
        observed += f"; {'the first without a counterpart' if alone else 'the last that all issued'} is {shown}"
        line = shown.call_line or shown.line
        return Finding(Cause.EXTRA_COLLECTIVE, observed, odd, line, is_rank_known=is_known, is_by_past=bool(changed))

    def _changed(self) -> tuple[int, ...]:
        """Ranks that issued a different number in the call before, if not all did."""
        if self._call == 0:
            return ()
        before = {rank: one.issued(self._call - 1).get(self._group) for rank, one in self._calls.items()}
        changed = tuple(rank for rank, count in self._counts.items() if count != before[rank])
        return changed if len(changed) < len(self._counts) else ()

    def _numbered(self, number: int, ranks: Iterable[int], states: Mapping[int, RankState]) -> Issued | None:
        """The collective of that number in this call, from 1, from a rank whose record has it; None for 0."""
        if number == 0:
            return None
        recorded = [states[rank] for rank in ranks if rank in states]
        for state in recorded:
            wanted = self._calls[state.rank].begun[self._call][self._group] + number
            found = first(one for one in state.issued_in(self._group) if one.seq == wanted)
            if found is not None:
                return found
        return None
