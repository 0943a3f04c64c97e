"""States of ranks of all domains -> a ring of ranks, each of which waits for the next one: pure.

No rank of a ring can progress, whatever the other ranks do. The states were taken at different times, so a ring counts
only once every rank in it has answered two later questions without having moved: then all of them waited at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.bounds import Number, Rank
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.timeline.stream import place_of
from tpcompile.sentinel.describe import describe
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.situation import Lost, Situation
from tpcompile.sentinel.waits import Wait, waits_of_rank

_LATER_ANSWERS = 2


class Seen(Frozen):
    """A state that a rank's domain has published."""

    state: RankState
    number: Number
    """Number of the answers of that domain, increasing."""
    domain: tuple[Rank, ...]
    """The ranks that compile the same."""

    @property
    def rank(self) -> int:
        """Whose state it is."""
        return self.state.rank


class Deadlock:
    """Finds a ring in successive rounds, and remembers the one that it saw last."""

    def __init__(self) -> None:
        self._ring: tuple[object, ...] = ()
        self._since: Mapping[int, int] = {}
        """Numbers of the answers in which that ring was seen first."""

    def find(self, seen: ByRank[Seen]) -> Finding | None:
        """The finding for a ring whose ranks have not moved since an earlier round."""
        ring = ring_of(waits_among(seen))
        ranks = [wait.rank for wait in ring]
        numbers = {rank: seen[rank].number for rank in ranks}
        here = tuple((wait.rank, wait.target, _place(seen[wait.rank].state)) for wait in ring)
        if here != self._ring:
            self._ring, self._since = here, numbers
            return None
        has_stayed = all(numbers[rank] >= self._since[rank] + _LATER_ANSWERS for rank in ranks)
        return _finding(ring, seen) if ring and has_stayed else None


def waits_among(seen: ByRank[Seen]) -> list[Wait]:
    """The waits of ranks whose main thread is held; a rank that runs its own code or compiles waits for none."""
    held = seen.where(lambda one: _is_held(one.state))
    everyone = _situation(seen)
    return [wait for rank in held for wait in waits_of_rank(rank, _ending_waits_of(rank, seen) or everyone)]


def _ending_waits_of(rank: int, seen: ByRank[Seen]) -> Situation | None:
    """For a rank that waits after a compile the ranks of its domain, as only they end that wait."""
    here = seen[rank]
    if here.state.waits_at is None:
        return None
    return _situation(seen.where(lambda one: one.domain == here.domain))


def _situation(seen: ByRank[Seen]) -> Situation:
    states = seen.map(lambda one: one.state)
    return Situation(states, before=states, lost=ByRank[Lost]({}))


def ring_of(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """Waits of which each leads to the next and the last one to the first; a ring of two ranks if there is one."""
    by_rank: dict[int, dict[int, Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, {})[wait.target] = wait
    pairs = ([rank, to] for rank in sorted(by_rank) for to in sorted(by_rank[rank]) if rank in by_rank.get(to, ()))
    ring = first(pairs)
    if ring is None:
        leading = _without_ends(by_rank)
        ring = _closed_path(leading) if leading else []
    return tuple(by_rank[here][there] for here, there in zip(ring, ring[1:] + ring[:1], strict=True))


def _without_ends(waits: Mapping[int, Mapping[int, Wait]]) -> Mapping[int, Mapping[int, Wait]]:
    """Only ranks that wait for a rank that waits, and so on: every one of them leads to a ring."""
    left = {rank: {to: wait for to, wait in mine.items() if to in waits} for rank, mine in waits.items()}
    kept = {rank: mine for rank, mine in left.items() if mine}
    return kept if len(kept) == len(waits) else _without_ends(kept)


def _closed_path(waits: Mapping[int, Mapping[int, Wait]]) -> list[int]:
    path: list[int] = []
    rank = min(waits)
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank])
    return path[path.index(rank) :]


def _is_held(state: RankState) -> bool:
    """True while the main thread cannot continue by itself, whatever time passes."""
    if state.ended or state.waits_at is not None:
        return not state.ended
    return not state.compiles and (state.p2p is not None or _is_in_collective(state))


def _is_in_collective(state: RankState) -> bool:
    """True for a main thread that waits in the collective in flight, or before it can issue one.

    Of collectives of several groups in flight it may wait for any one, and may have issued the others asynchronously.
    """
    groups = {issued.group for issued in state.in_flight}
    if state.calling:
        return groups <= {state.calling}
    return state.blocked and len(groups) == 1


def _place(state: RankState) -> tuple[object, ...]:
    """What changes when a rank moves."""
    issued = state.blocked_in
    numbers = sorted((group, state.last_number(group)) for group in state.groups)
    held_in = state.waits_at, state.p2p, state.calling, issued and issued.id
    return *held_in, numbers, sorted(state.calls.items()), place_of(state.stack)


def _finding(ring: tuple[Wait, ...], seen: ByRank[Seen]) -> Finding:
    says = "; ".join(f"rank {wait.rank} waits {wait.what}" for wait in ring)
    ranks = tuple(sorted({wait.rank for wait in ring}))
    states = seen.map(lambda one: one.state)
    details = tuple(map(describe, states.values()))
    explained = parted(states, domains=seen.map(lambda one: one.domain).groups(), are_stuck=True)
    if explained is not None:
        return replace(explained, observed=f"{explained.observed}; {says}", details=details)
    observed = f"each rank waits for the next one: {says}"
    line = first(known(state.wait_line for state in states.among(ranks).values()))
    return Finding(Cause.STUCK_COLLECTIVE, observed, ranks, line, details)
