"""The first op that only some ranks run -> the line at which their way to it leaves that of the other ranks.

An op of one layer more is deep in that layer, on a line that the other ranks run as well; the ranks parted in the loop
over the layers. A line that only some ranks run is where they parted. A stack is known of lines that were traced from
one place only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.iterables import num_equal
from tpcompile.evidence.records import Item, ItemKind, UserLine
from tpcompile.evidence.records.causes import Cause

_BRANCHES = frozenset({Cause.RANK_BRANCH, Cause.EXTRA_COLLECTIVE})
Stack = Sequence[UserLine]


def at_parting(row: Row, items: Items, cause: Cause) -> Row:
    """The row; the first op that the groups do differently, on a line that all run, is where its stack parts."""
    if cause not in _BRANCHES or not row.present:
        return row
    phase = row.first.about if row.first.kind == ItemKind.COLLECTIVE else ""
    calls = items.only(lambda item: item.about == phase if phase else item.fields.get("op") == "call")
    first = _first_different(calls)
    stacks = [_stack(item) for item in first]
    known = [stack for stack in stacks if stack is not None]
    if len(known) < len(stacks):
        return row
    lines = [{item.line for item in group} for group in calls]
    found: list[Item | None] = []
    for index, item in enumerate(row):
        is_first = item is not None and item == first[index]
        is_run_by_all = item is not None and all(item.line in group for group in lines)
        if item is not None and is_first and is_run_by_all:
            own, others = known[index], [*known[:index], *known[index + 1 :]]
            # The last frame that it shares with the stack nearest to it.
            place = max((_parted_at(own, other) for other in others), default=len(own) - 1)
            item = item.changed(line=own[place] if own else None)
        found.append(item)
    return Row(found)


def _first_different(calls: Items) -> list[Item | None]:
    """What each group does at the first place where they do not all do the same; None for one that has ended."""
    for column in itertools.zip_longest(*calls):
        row = Row(column)
        if not row.agree_in(lambda item: item.fields.get("target") or item.key):
            return list(row)
    return [None] * len(calls)


def _stack(item: Item | None) -> Stack | None:
    """Lines from the compiled frame to the op; empty for a group that has ended, None where they are not known."""
    if item is None:
        return ()
    if item.callers is None or item.line is None:
        return None
    return (*item.callers, item.line)


def _parted_at(own: Stack, other: Stack) -> int:
    """Index of the line of `own` in the last frame that both are in."""
    num_shared = num_equal([own, other])
    if num_shared == len(own):
        return num_shared - 1
    if num_shared == len(other):  # it has ended, or is on the line from which `own` goes on
        return max(num_shared - 1, 0)
    ours, theirs = own[num_shared], other[num_shared]
    is_same_frame = (ours.file, ours.function) == (theirs.file, theirs.function)
    return num_shared if is_same_frame else max(num_shared - 1, 0)
