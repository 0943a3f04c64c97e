"""One value per group of equal ranks -> which groups differ; the items of a layer, and one row of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, Self, TypeVar

from tpcompile.evidence.groups.by_rank import itself
from tpcompile.evidence.iterables import differ
from tpcompile.evidence.records import Item, UserLine
from tpcompile.evidence.records.base import lines_of

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


class ByGroup(tuple[T, ...], Generic[T]):
    """One value per group of ranks, in the order of the groups."""

    __slots__ = ()

    def map(self, what: Callable[[T], U]) -> ByGroup[U]:
        """The same groups, with the function applied to every value."""
        return ByGroup(map(what, self))

    def differ(self, by: Callable[[T], Hashable] = itself) -> bool:
        """True unless all groups have the same value."""
        return differ(map(by, self))

    def where(self, holds: Callable[[T], object]) -> frozenset[int]:
        """Indices of the groups whose value satisfies the predicate."""
        return frozenset(index for index, value in enumerate(self) if holds(value))

    def picked(self, order: Iterable[int]) -> Self:
        """The values of these groups, in the given order."""
        return type(self)(self[index] for index in order)


class Items(ByGroup[tuple[Item, ...]]):
    """The items of a layer, one tuple per group of ranks."""

    __slots__ = ()

    @property
    def all(self) -> list[Item]:
        """The items of all groups."""
        return list(itertools.chain.from_iterable(self))

    def only(self, holds: Callable[[Item], object]) -> Items:
        """The items of each group that satisfy the predicate."""
        return Items(tuple(filter(holds, group)) for group in self)

    def each(self, what: Callable[[Item], V]) -> ByGroup[tuple[V, ...]]:
        """The function applied to every item, in order."""
        return ByGroup(tuple(map(what, group)) for group in self)

    def own(self, of: Callable[[Item], Hashable] = operator.attrgetter("key")) -> Items:
        """The items of each group that not all groups have; `of` gives what is compared, by default all fields."""
        keys = self.each(of)
        common = set(keys[0]).intersection(*keys)
        return self.only(lambda item: of(item) not in common)

    def differing(self) -> list[Row]:
        """The rows in which the groups differ."""
        return [row for row in side_by_side(self) if row.differs]


class Row(ByGroup[Item | None]):
    """The item of each group of ranks at one position; None where a group has none."""

    __slots__ = ()

    @property
    def present(self) -> tuple[Item, ...]:
        """The items, without None."""
        return tuple(filter(None, self))

    @property
    def first(self) -> Item:
        """The first item; there must be one."""
        return self.present[0]

    @property
    def is_full(self) -> bool:
        """True when every group has an item."""
        return None not in self

    @property
    def differs(self) -> bool:
        """True unless all groups have equal items."""
        return not self.agree_in(lambda item: item.key)

    @property
    def lines(self) -> tuple[UserLine, ...]:
        """The user's lines of the items, where they are known."""
        return tuple(lines_of(self.present))

    @property
    def owners(self) -> frozenset[int]:
        """Indices of the groups that have an item."""
        return self.where(bool)

    def distinct(self, of: Callable[[Item], Hashable]) -> frozenset[Hashable]:
        """The distinct values of a function of the items."""
        return frozenset(map(of, self.present))

    def all_are(self, holds: Callable[[Item], object]) -> bool:
        """True when every group has an item that satisfies the predicate."""
        return self.is_full and all(map(holds, self.present))

    def agree_in(self, what: Callable[[Item], Hashable]) -> bool:
        """True when every group has an item, and the function gives the same value for all of them."""
        return self.is_full and len(self.distinct(what)) == 1

    def differing(self, fields: Iterable[str]) -> list[str]:
        """The fields in which the items have different values."""
        return [field for field in fields if differ(self.values(field))]

    def differs_in_note(self, name: str) -> bool:
        """True when the groups have different notes of that name."""
        return differ(self.notes(name))

    def values(self, field: str) -> list[str]:
        """The values of a field of the items."""
        return [item.fields[field] for item in self.present]

    def notes(self, name: str) -> list[str]:
        """The note of every group; empty for a group without one."""
        return [item.notes.get(name, "") if item else "" for item in self]

    def has_all(self, note: str) -> bool:
        """True when every group has that note."""
        return all(self.notes(note))


def side_by_side(columns: Iterable[Sequence[Item]]) -> list[Row]:
    """One row per position of the columns."""
    return list(map(Row, itertools.zip_longest(*columns)))
