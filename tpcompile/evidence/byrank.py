"""One value of each rank -> the ranks that have the same, and those that have something else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from tpcompile.evidence.several import differ, grouped

T = TypeVar("T")
U = TypeVar("U")
Groups = tuple[tuple[int, ...], ...]
"""Ranks in groups of equal ones."""


def ranks_in(groups: Groups, indices: Iterable[int]) -> list[int]:
    """The ranks of some of the groups."""
    return [rank for index in sorted(indices) for rank in groups[index]]


def itself(value: T) -> T:
    """What is compared where nothing else is said."""
    return value


class ByRank(Mapping[int, T], Generic[T]):
    """Values by rank, in the order of the ranks."""

    def __init__(self, values: Mapping[int, T]) -> None:
        self._values = {rank: values[rank] for rank in sorted(values)}

    def __getitem__(self, rank: int) -> T:
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(self._values)

    @property
    def first(self) -> T:
        """The value of the lowest rank; there must be one."""
        return next(iter(self._values.values()))

    def map(self, what: Callable[[T], U]) -> ByRank[U]:
        """The same ranks, each with what is made of its value."""
        return ByRank({rank: what(value) for rank, value in self._values.items()})

    def found(self, what: Callable[[T], U | None]) -> ByRank[U]:
        """What is made of the values, of ranks for which it is not None."""
        made = self.map(what)
        return ByRank({rank: value for rank, value in made.items() if value is not None})

    def where(self, holds: Callable[[T], object]) -> ByRank[T]:
        """The ranks with such a value."""
        return ByRank({rank: value for rank, value in self._values.items() if holds(value)})

    def without(self, ranks: Collection[int]) -> ByRank[T]:
        """The other ranks."""
        return ByRank({rank: value for rank, value in self._values.items() if rank not in ranks})

    def among(self, ranks: Iterable[int]) -> ByRank[T]:
        """Only these ranks."""
        return ByRank({rank: self._values[rank] for rank in ranks})

    def groups(self, by: Callable[[T], Hashable] = itself) -> Groups:
        """Ranks that have the same, the largest group first; of equal ones that with the lowest rank."""
        groups = grouped(self, lambda rank: by(self._values[rank]))
        return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks[0])))

    def sides(self) -> list[tuple[tuple[int, ...], T]]:
        """Those groups, each with its value."""
        return [(ranks, self._values[ranks[0]]) for ranks in self.groups()]

    def differ(self, by: Callable[[T], Hashable] = itself) -> bool:
        """True unless all ranks have the same."""
        return differ(map(by, self._values.values()))

    def unlike_most(self, by: Callable[[T], Hashable]) -> tuple[int, ...]:
        """Ranks that do not have what the largest group has, as `groups` orders them."""
        largest, *_ = self.groups(by)
        return self.without(largest).ranks

    def unlike_majority(self, by: Callable[[T], Hashable]) -> tuple[int, ...]:
        """Ranks that do not have what more than half of them have; none where no value is had by so many."""
        odd = self.unlike_most(by)
        return odd if 2 * len(odd) < len(self) else ()

    def some(self, holds: Callable[[T], object]) -> tuple[int, ...]:
        """Ranks of which that holds; none where it holds of all, for then nobody differs."""
        odd = self.where(holds).ranks
        return odd if len(odd) < len(self) else ()


def by_name(tables: Mapping[int, Mapping[str, T]], names: Iterable[str] = ()) -> list[ByRank[T]]:
    """Tables of ranks -> each entry that more than one rank has; in the order of `names`, or of all names sorted."""
    wanted = names or sorted(set[str]().union(*tables.values()))
    entries = [entry(tables, name) for name in wanted]
    return [one for one in entries if len(one) > 1]


def entry(tables: Mapping[int, Mapping[str, T]], name: str) -> ByRank[T]:
    """What the ranks have under one name."""
    return ByRank(tables).found(lambda table: table.get(name))
