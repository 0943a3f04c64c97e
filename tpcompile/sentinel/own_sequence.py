"""Collectives of a rank, in order -> where it deviates from its own earlier sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from tpcompile.sentinel.messages import Issued, Key

_RECENT = 12
"""Last collectives that are searched for a deviation from the common order."""


def surprise(keys: Sequence[Key], place: int, elsewhere: Iterable[int]) -> int:
    """How much the collective at `place` deviates from the sequence: 0 where it follows it, or nothing is known.

    Among the places `elsewhere`, those with the longest common run of preceding collectives show what usually follows.
    If the collective at `place` is not one of these, the length of that run is returned.
    """
    contexts = {other: _num_common_before(keys, place, other) for other in elsewhere}
    longest = max(contexts.values(), default=0)
    usual = {keys[other] for other, length in contexts.items() if length == longest}
    return 0 if keys[place] in usual else longest


def _num_common_before(keys: Sequence[Key], place: int, other: int) -> int:
    """Length of the common run of collectives before two places."""
    pairs = zip(reversed(keys[:place]), reversed(keys[:other]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def strangest(issued: Sequence[Issued]) -> Issued | None:
    """The most unusual of the last collectives; None when all are usual.

    It is compared with earlier and later places: what ends the first step also ends the later ones.
    """
    keys = [one.key for one in issued]
    places = range(1, len(keys))
    surprises = {place: surprise(keys, place, {*places} - {place}) for place in places[-_RECENT:]}
    if _ends_with_something_new(issued):
        last = places[-1]
        surprises[last] = max(surprises[last], 1)
    most = max(surprises, key=lambda place: (surprises[place], place), default=0)
    return issued[most] if surprises.get(most) else None


def _ends_with_something_new(issued: Sequence[Issued]) -> bool:
    """True when the rank is in a collective that it never issued before."""
    *before, last = [one.key for one in issued]
    return len(before) > 1 and last not in before and not issued[-1].is_done
