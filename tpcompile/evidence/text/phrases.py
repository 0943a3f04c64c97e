"""Several texts -> one line for the reader."""

from __future__ import annotations

from collections.abc import Iterable


def phrase(*parts: str) -> str:
    """`C/first, forward model.py:3`: the parts that are not empty, in one line."""
    return ", ".join(filter(None, parts))


def listed(texts: Iterable[str], *, by: str, at_most: int) -> str:
    """`8 -> 9, 9 -> 10 and 3 more`: each text once, the first few."""
    different = list(dict.fromkeys(texts))
    more = f" and {len(different) - at_most} more" if len(different) > at_most else ""
    return by.join(different[:at_most]) + more
