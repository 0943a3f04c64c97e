"""Several values -> one of them, whether they differ, or groups of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
A = TypeVar("A")
K = TypeVar("K", bound=Hashable)
G = TypeVar("G", bound=Collection[object])


def first(values: Iterable[T]) -> T | None:
    """The first value, None when there is none."""
    return next(iter(values), None)


def find(values: Iterable[T], holds: Callable[[T], object]) -> T | None:
    """The first value that satisfies the predicate, None when there is none."""
    return first(filter(holds, values))


def last(values: Sequence[T]) -> T | None:
    """The last value, None when there is none."""
    return next(reversed(values), None)


def differ(values: Iterable[Hashable]) -> bool:
    """True unless all values are equal."""
    return len(set(values)) > 1


def num_equal(rows: Iterable[Iterable[Hashable]]) -> int:
    """Number of places, from the first on, in which all rows have the same value."""
    columns = zip(*rows, strict=False)
    return len(list(itertools.takewhile(lambda column: not differ(column), columns)))


def grouped(values: Iterable[T], by: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by key; keys and values in order of appearance."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(by(value), []).append(value)
    return found


def majority(groups: Iterable[G], *, of: int = 0) -> G | None:
    """The group with more than half of the members of all groups, or of a larger number of them; None without one.

    The one rule by which ranks outvote others.
    """
    known = list(groups)
    largest = max(known, key=len, default=None)
    num_members = max(of, sum(map(len, known)))
    return largest if largest is not None and 2 * len(largest) > num_members else None


def indexed(values: Iterable[T], by: Callable[[T], K]) -> dict[K, T]:
    """One value per key; of several with the same key, the last."""
    return {by(value): value for value in values}


def unlike(values: Iterable[T], others: Iterable[T], by: Callable[[T], Hashable]) -> list[T]:
    """Values whose key no value of `others` has."""
    taken = set(map(by, others))
    return [value for value in values if by(value) not in taken]


def first_answer(questions: Iterable[Callable[[T], A | None]], about: T) -> A | None:
    """The first answer that is not None."""
    for ask in questions:
        answer = ask(about)
        if answer is not None:
            return answer
    return None
