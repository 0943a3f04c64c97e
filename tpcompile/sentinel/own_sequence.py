"""Collectives of a rank, in order -> where it deviates from its own earlier sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from tpcompile.sentinel.messages import Key


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
