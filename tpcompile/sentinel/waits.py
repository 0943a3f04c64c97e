"""A situation -> which rank waits for which: only waits that cannot end unless the other rank progresses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

from tpcompile.evidence.records.base import at_text
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.situation import Situation


class Wait(NamedTuple):
    """One rank waits for a different one."""

    rank: int
    target: int
    what: str
    """What it waits for, as the end of `rank 1 waits ...`."""


def waits_of(situation: Situation) -> list[Wait]:
    """All waits, by rank."""
    return [wait for rank in situation.now for wait in waits_of_rank(rank, situation)]


def waits_of_rank(rank: int, situation: Situation) -> list[Wait]:
    """The waits of one rank."""
    what, targets = _awaited(situation.now[rank], situation)
    return [Wait(rank, target, what) for target in targets]


def mutual_waits(situation: Situation) -> list[tuple[Wait, Wait]]:
    """Pairs of ranks that wait for each other, the lower rank's wait first."""
    waits = {(wait.rank, wait.target): wait for wait in waits_of(situation)}
    pairs = combinations_with_replacement(situation.now, 2)  # a rank may send to itself
    return [(waits[a, b], waits[b, a]) for a, b in pairs if {(a, b), (b, a)} <= waits.keys()]


def _awaited(state: RankState, situation: Situation) -> tuple[str, Sequence[int]]:
    """What a rank waits for, and the ranks without which the wait does not end."""
    others = situation.now.without([state.rank])
    if state.waits_at is not None:
        late = others.where(lambda theirs: theirs.waits_at != state.waits_at)
        return f"for the other ranks at {state.waits_at}", late.ranks
    if state.p2p is not None:  # not for a collective that is in flight meanwhile
        return f"in {state.p2p}", [state.p2p.peer] if state.rank in situation.in_p2p else []
    if state.rank in situation.stuck:
        issued = situation.stuck[state.rank]
        late = others.where(lambda theirs: theirs.can_still_join(issued.group, issued.seq))
        return f"in {issued}", late.ranks
    if state.rank in situation.calling:
        group = state.calling
        number = state.last_number(group) + 1
        late = others.where(lambda theirs: theirs.calling != group and theirs.can_still_join(group, number))
        return f"to begin a collective of group {group!r}{at_text(state.line)}", late.ranks
    return "", []
