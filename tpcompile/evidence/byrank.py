"""A value for each rank -> which ranks have the same, and whether all do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from tpcompile.evidence.several import differ, grouped

V = TypeVar("V")
W = TypeVar("W")
Groups = tuple[tuple[int, ...], ...]
"""Ranks in groups of equal ones."""


class ByRank(dict[int, V], Generic[V]):
    """What each rank has."""

    def of(self, ask: Callable[[V], W]) -> ByRank[W]:
        """What is to be said about it, by rank."""
        return ByRank(zip(self, map(ask, self.values()), strict=True))

    def where(self, holds: Callable[[V], bool]) -> ByRank[V]:
        """Only the ranks for whose value that holds."""
        return ByRank({rank: value for rank, value in self.items() if holds(value)})

    def among(self, ranks: Iterable[int]) -> ByRank[V]:
        """Only these ranks."""
        return ByRank({rank: self[rank] for rank in ranks})

    @property
    def observed(self: ByRank[W | None]) -> ByRank[W]:
        """Only the ranks that have something else than None."""
        return ByRank({rank: value for rank, value in self.items() if value is not None})

    @property
    def differs(self) -> bool:
        """True unless all ranks have the same."""
        return differ(self.values())

    @property
    def groups(self) -> Groups:
        """Ranks by equal value, largest group first: the odd ones out come last."""
        groups = grouped(sorted(self), self.__getitem__)
        return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks[0])))

    @property
    def sides(self) -> list[tuple[tuple[int, ...], V]]:
        """Those groups, each with its value."""
        return [(ranks, self[ranks[0]]) for ranks in self.groups]
