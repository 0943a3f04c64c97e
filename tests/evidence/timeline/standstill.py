"""What every rank would do -> what each has done when the job stands still: collectives wait for all of their group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.timeline.stream import Event, How, Kind

Met = tuple[str, int]
"""Group and number: one collective, on all ranks of the group."""


@dataclass
class Stood:
    """One rank when the job stands still."""

    num_events: int
    """Events that it has done or begun."""
    how: How
    waits_in: set[Met]
    """Collectives that it began and that have not ended."""


class Job:
    """Ranks that run until none can go on. With `ahead` a rank issues so many collectives before it waits."""

    def __init__(
        self, events: Mapping[int, Sequence[Event]], groups: Mapping[str, Sequence[int]], *, ahead: int
    ) -> None:
        self.events, self.groups, self.ahead = events, groups, ahead
        self.at = dict.fromkeys(events, 0)
        self.begun: dict[int, dict[Met, Event]] = {rank: {} for rank in events}
        self.numbers: dict[int, Counter[str]] = {rank: Counter() for rank in events}
        self.pending: dict[int, list[Met]] = {rank: [] for rank in events}

    def run(self, limit: int) -> None:
        """Until the job stands still, or one rank has done `limit` events."""
        moves = True
        while moves and max(self.at.values()) < limit:
            moves = any([self._moves(rank) for rank in self.events])

    def _moves(self, rank: int) -> bool:
        pending = [met for met in self.pending[rank] if not self._is_complete(met)]
        has_moved = len(pending) < len(self.pending[rank])
        self.pending[rank] = pending
        if len(pending) > self.ahead or self.at[rank] == len(self.events[rank]):
            return has_moved
        event = self.events[rank][self.at[rank]]
        self.at[rank] += 1
        if event.kind == Kind.COLLECTIVE:
            self.numbers[rank][event.group] += 1
            met = event.group, self.numbers[rank][event.group]
            self.begun[rank][met] = event
            self.pending[rank].append(met)
        return True

    def _is_complete(self, met: Met) -> bool:
        there = [self.begun[rank].get(met) for rank in self.groups[met[0]]]
        what = {(event.name, *sorted(event.content.items())) for event in there if event}
        return None not in there and len(what) == 1

    def result(self, ends: Mapping[int, How]) -> dict[int, Stood]:
        """Every rank as it stands now; a rank that has nothing left to do ended as `ends` says."""
        return {rank: self._stood(rank, how) for rank, how in ends.items()}

    def _stood(self, rank: int, end: How) -> Stood:
        waits_in = set(self.pending[rank])
        is_over = self.at[rank] == len(self.events[rank]) and not waits_in
        how = end if is_over else How.WAITING if waits_in else How.RUNNING
        return Stood(self.at[rank], how, waits_in)

    def unequal(self) -> Met | None:
        """A collective that all of its ranks began, with one op and unequal content: gloo aborts there."""
        for met in sorted(set[Met]().union(*self.pending.values())):
            there = [self.begun[rank].get(met) for rank in self.groups[met[0]]]
            known = [event for event in there if event]
            if len(known) == len(there) and len({event.name for event in known}) == 1:
                return met
        return None
