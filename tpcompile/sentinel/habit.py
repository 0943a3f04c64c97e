"""What a rank issued, in order -> where it left its own habit: after what it issued before, something else followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from tpcompile.sentinel.messages import Key


def surprise(keys: Sequence[Key], place: int, elsewhere: Iterable[int]) -> int:
    """How much speaks against what stands at a place: 0 where it is usual, or where nothing is known.

    Of the places `elsewhere`, those count before which most collectives are the same as before this one; what follows
    there is usual. The number of those collectives is returned where something else stands here.
    """
    contexts = {other: _num_common_before(keys, place, other) for other in elsewhere}
    longest = max(contexts.values(), default=0)
    usual = {keys[other] for other, length in contexts.items() if length == longest}
    return 0 if keys[place] in usual else longest


def _num_common_before(keys: Sequence[Key], place: int, other: int) -> int:
    """How many collectives before two places are the same."""
    pairs = zip(reversed(keys[:place]), reversed(keys[:other]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
