"""States of ranks, a group -> the collective of each rank under each number of the group: pure.

Collectives of a group are numbered, so ranks that run the same program issue the same one under each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.sentinel.messages import Issued, RankState


class History:
    """Collectives of the ranks in one group, as far back as the flight recorders reach."""

    def __init__(self, states: Mapping[int, RankState], group: str) -> None:
        self._by_rank = ByRank(states).map(lambda state: {one.seq: one for one in state.issued_in(group)})

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers under which more than one rank issued something, in order."""
        known = sorted(set[int]().union(*self._by_rank.values()))
        return [number for number in known if len(self.under(number)) > 1]

    def under(self, number: int) -> ByRank[Issued]:
        """The collective of each rank under that number."""
        return self._by_rank.found(lambda issued: issued.get(number))

    def of(self, rank: int) -> Mapping[int, Issued]:
        """Number -> collective of that rank."""
        return self._by_rank[rank]


def groups_used(states: Mapping[int, RankState]) -> list[str]:
    """Groups in which any of the ranks issued a collective."""
    return sorted({issued.group for issued in issued_by_all(states)})


def issued_by_all(states: Mapping[int, RankState]) -> list[Issued]:
    """Collectives of all ranks, rank by rank."""
    return [issued for state in states.values() for issued in state.issued]
