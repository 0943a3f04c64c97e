"""Several values -> one of them, whether they are one, or by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def first(values: Iterable[T]) -> T | None:
    """The first value, None when there is none."""
    return next(iter(values), None)


def last(values: Sequence[T]) -> T | None:
    """The last value, None when there is none."""
    return next(reversed(values), None)


def differ(values: Iterable[Hashable]) -> bool:
    """True unless all values are one."""
    return len(set(values)) > 1


def phrase(*parts: str) -> str:
    """`C/first, forward model.py:3`: the parts that there are, in one line."""
    return ", ".join(filter(None, parts))


def grouped(values: Iterable[T], by: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by what they have in common, both in order of appearance."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(by(value), []).append(value)
    return found
