"""One value per rank -> groups of ranks with equal values, and the ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from tpcompile.evidence.iterables import differ, grouped, majority

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
U = TypeVar("U")
Groups = tuple[tuple[int, ...], ...]
"""Groups of ranks with equal values."""


def ranks_in(groups: Groups, indices: Iterable[int]) -> list[int]:
    """The ranks of the groups at these indices."""
    return [rank for index in sorted(indices) for rank in groups[index]]


def itself(value: T) -> T:
    """Identity: by default values themselves are compared."""
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
        """All ranks, in order."""
        return tuple(self._values)

    @property
    def first(self) -> T:
        """The value of the lowest rank; there must be one."""
        return next(iter(self._values.values()))

    def map(self, what: Callable[[T], U]) -> ByRank[U]:
        """The same ranks, with the function applied to every value."""
        return ByRank({rank: what(value) for rank, value in self._values.items()})

    def found(self, what: Callable[[T], U | None]) -> ByRank[U]:
        """The function applied to every value; ranks for which it is None are left out."""
        made = self.map(what)
        return ByRank({rank: value for rank, value in made.items() if value is not None})

    def where(self, holds: Callable[[T], object]) -> ByRank[T]:
        """The ranks whose value satisfies the predicate."""
        return ByRank({rank: value for rank, value in self._values.items() if holds(value)})

    def without(self, ranks: Collection[int]) -> ByRank[T]:
        """The other ranks."""
        return ByRank({rank: value for rank, value in self._values.items() if rank not in ranks})

    def among(self, ranks: Iterable[int]) -> ByRank[T]:
        """Only these ranks."""
        return ByRank({rank: self._values[rank] for rank in ranks})

    def groups(self, by: Callable[[T], Hashable] = itself) -> Groups:
        """Groups of ranks with equal values, the largest group first; of equally large ones, by lowest rank."""
        groups = grouped(self, lambda rank: by(self._values[rank]))
        return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks[0])))

    def sides(self) -> list[tuple[tuple[int, ...], T]]:
        """The groups of equal ranks, each with its value."""
        return [(ranks, self._values[ranks[0]]) for ranks in self.groups()]

    def differ(self, by: Callable[[T], Hashable] = itself) -> bool:
        """True unless all ranks have the same value."""
        return differ(map(by, self._values.values()))

    def unlike_most(self, by: Callable[[T], Hashable]) -> tuple[int, ...]:
        """Ranks outside the first of the `groups`."""
        largest, *_ = self.groups(by)
        return self.without(largest).ranks

    def blamed(self, by: Callable[[T], Hashable], *, of: int = 0) -> tuple[tuple[int, ...], bool]:
        """The ranks outside of a majority, and True; without one all ranks, and False: nothing tells which is wrong."""
        odd = self.unlike_majority(by, of=of)
        return (odd, True) if odd else (self.ranks, False)

    def unlike_majority(self, by: Callable[[T], Hashable], *, of: int = 0) -> tuple[int, ...]:
        """Ranks whose value differs from that of a majority, `of` a number of ranks if some are unknown; else none."""
        most = majority(self.groups(by), of=of)
        return self.without(most).ranks if most is not None else ()

    def some(self, holds: Callable[[T], object]) -> tuple[int, ...]:
        """Ranks whose value satisfies the predicate; empty where those of all ranks do, as then no rank differs."""
        odd = self.where(holds).ranks
        return odd if len(odd) < len(self) else ()


def by_name(tables: Mapping[int, Mapping[str, T]], names: Iterable[str] = ()) -> list[ByRank[T]]:
    """Tables by rank -> the entries that more than one rank has, in the order of `names`, by default sorted by name."""
    wanted = names or sorted(set[str]().union(*tables.values()))
    entries = [entry(tables, name) for name in wanted]
    return [one for one in entries if len(one) > 1]


def entry(tables: Mapping[int, Mapping[K, T]], name: K) -> ByRank[T]:
    """The entries of one name, by rank."""
    return ByRank(tables).found(lambda table: table.get(name))
