"""The items of two ranks in one layer -> rows side by side, with the first difference among them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.evidence.iterables import num_equal
from tpcompile.evidence.records import Item
from tpcompile.evidence.shortened import shortened

_AROUND = 6
"""Equal rows before the first difference, and after each further one."""
_MAX_ROWS = 120
_MAX_ALIGNED = 1_500
"""Items that are aligned, from the first difference on."""
_MAX_CHARS = 400


@dataclass(frozen=True)
class Row:
    """What each side has; None for nothing."""

    left: str | None
    right: str | None
    number: int
    """Number of the item on the left, or where it would be, from 1."""

    @property
    def differs(self) -> bool:
        """True where the sides differ."""
        return self.left != self.right


@dataclass(frozen=True)
class Listing:
    """Two sides of a layer."""

    left: str
    """`rank 0`."""
    right: str
    rows: tuple[Row | None, ...]
    """None stands for equal rows that are left out."""
    num_left_out: int
    """Rows after the last one that is shown."""


def listing(left: Sequence[Item], right: Sequence[Item], titles: tuple[str, str]) -> Listing | None:
    """Both sides from a few rows before the first difference on; None where they do not differ."""
    one, two = ([shortened(item.text, at_most=_MAX_CHARS) for item in items] for items in (left, right))
    same = num_equal((one, two))
    if same == len(one) == len(two):
        return None
    rows = [Row(text, text, number + 1) for number, text in enumerate(one[:same])]
    rows += _aligned(one[same : same + _MAX_ALIGNED], two[same : same + _MAX_ALIGNED], same)
    shown = _near_differences(rows)
    num_left_out = max(0, max(len(one), len(two)) - same - _MAX_ALIGNED)
    if len(shown) > _MAX_ROWS:
        num_left_out += len(shown) - _MAX_ROWS
        shown = shown[:_MAX_ROWS]
    return Listing(*titles, tuple(shown), num_left_out)


def _aligned(one: Sequence[str], two: Sequence[str], before: int) -> list[Row]:
    rows: list[Row] = []
    matcher = difflib.SequenceMatcher(None, one, two, autojunk=False)
    for _, left_from, left_to, right_from, right_to in matcher.get_opcodes():
        for offset in range(max(left_to - left_from, right_to - right_from)):
            left, right = left_from + offset, right_from + offset
            rows.append(
                Row(
                    one[left] if left < left_to else None,
                    two[right] if right < right_to else None,
                    before + min(left, left_to) + 1,
                )
            )
    return rows


def _near_differences(rows: Sequence[Row]) -> list[Row | None]:
    """The rows that differ and those around them; a gap for the others."""
    wanted = set[int]()
    for number, row in enumerate(rows):
        if row.differs:
            wanted.update(range(number - _AROUND, number + _AROUND + 1))
    shown: list[Row | None] = []
    for number, row in enumerate(rows):
        if number in wanted:
            shown.append(row)
        elif shown[-1:] != [None]:
            shown.append(None)
    return shown
