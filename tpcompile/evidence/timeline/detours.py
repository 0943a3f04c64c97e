"""Two sequences that differ at one place -> the fewest detours that lead to where they are equal again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SAME = 10
_SAME_AT_END = 3
"""The same where a sequence ends with them."""
_FEW, _MANY = 24, 150
"""Values that are left out on both sides together, in the first and in the last search for several detours."""
_KEY = 12
"""Equal values in a row by which a place far away is found."""
_FAR = 12_000
Ends = tuple[int, int]
Detour = tuple[Ends, Ends]
"""Indices of both sequences where they part, and where they are equal again."""


class _Way(NamedTuple):
    """A way through both sequences: where it has come to, and the values that it left out, newest first."""

    at: Ends
    left_out: tuple[object, ...] | None
    """(where the value stands, the same of earlier ones)."""


def detours(
    mine: Sequence[int], theirs: Sequence[int], begin: Ends, *, same: Ends = (_SAME, _SAME_AT_END)
) -> list[Detour]:
    """At least one; the last one reaches the end of a sequence where they are never equal again.

    `same` equal values in a row end the search, the second number of them at the end of a sequence.
    """
    ends = len(mine), len(theirs)
    return (
        _fewest(mine, theirs, begin, _FEW, same)
        or _far(mine, theirs, begin)
        or _fewest(mine, theirs, begin, _MANY, same)
        or [(begin, ends)]
    )


def _fewest(mine: Sequence[int], theirs: Sequence[int], begin: Ends, limit: int, same: Ends) -> list[Detour]:
    """Myers' greedy search for the shortest script of edits, up to the first long run of equal values; else nothing.

    Of two scripts the better one leaves out about as much on both sides: in a loop, an element of each and no pass.
    """
    ends = len(mine), len(theirs)
    ways = {0: _Way(begin, None)}
    best: tuple[int, object] = limit + 1, None
    for num_edits in range(1, limit + 1):
        if num_edits >= best[0]:
            break
        further: dict[int, _Way] = {}
        for diagonal in range(-num_edits, num_edits + 1, 2):
            left, right = ways.get(diagonal - 1), ways.get(diagonal + 1)
            is_mine = right is None or (left is not None and left.at[0] >= right.at[0])
            way = left if is_mine else right
            if way is None:
                continue
            i, j = (way.at[0] + 1, way.at[1]) if is_mine else (way.at[0], way.at[1] + 1)
            if i > ends[0] or j > ends[1]:
                continue
            start, left_out = i, ((way.at, (i, j)), way.left_out)
            while i < ends[0] and j < ends[1] and mine[i] == theirs[j]:
                i, j = i + 1, j + 1
            is_end = i == ends[0] or j == ends[1]
            if i - start >= same[is_end]:
                best = min(best, (num_edits + abs(diagonal), left_out), key=lambda one: one[0])
            further[diagonal] = _Way((i, j), left_out)
        ways = further
    return _joined(best[1])


def _joined(left_out: object) -> list[Detour]:
    """The detours, each of one or more values in a row."""
    found: list[Detour] = []
    while isinstance(left_out, tuple):
        (start, end), left_out = left_out
        if found and found[-1][0] == end:
            found[-1] = start, found[-1][1]
        else:
            found.append((start, end))
    return found[::-1]


def _far(mine: Sequence[int], theirs: Sequence[int], begin: Ends) -> list[Detour]:
    """One long detour of one sequence or of both, to the nearest place from which both go the same way."""
    i, j = begin
    places: dict[tuple[int, ...], int] = {}
    for at in range(j, min(j + _FAR, len(theirs) - _KEY + 1)):
        places.setdefault(tuple(theirs[at : at + _KEY]), at)
    best: Ends | None = None
    for at in range(i, min(i + _FAR, len(mine) - _KEY + 1)):
        if best is not None and at + j >= sum(best):
            break
        other = places.get(tuple(mine[at : at + _KEY]))
        if other is not None and (best is None or at + other < sum(best)):
            best = at, other
    return [(begin, best)] if best is not None else []
