"""Items of a layer, one tuple per group of ranks -> the rows in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from tpcompile.evidence.groups.by_group import Items, Row, side_by_side
from tpcompile.evidence.iterables import first, grouped, num_equal
from tpcompile.evidence.records import Item, ItemKind

_WINDOW = 300
"""Items compared from the first difference on: the first difference is the finding, and aligning is quadratic."""


def rows_of(items: Items, *, is_ordered: bool) -> tuple[Row, ...]:
    """Rows of items, one item per group, wherever the groups differ."""
    if not is_ordered:
        return _rows_by_subject(items)
    start = first_difference(items)
    window = slice(start, start + _WINDOW)
    rest = Items(group[window] for group in items)
    if len(rest) == 2:
        return _aligned(*rest)
    # More than two groups: an item that only some have, or else the items at the same position.
    return tuple(_inserted(rest) or rest.differing())


def first_difference(groups: Iterable[Sequence[Item]]) -> int:
    """The first position at which the groups differ; the shortest group may end there."""
    return num_equal((item.key for item in group) for group in groups)


def _rows_by_subject(items: Items) -> tuple[Row, ...]:
    """Items about the same thing in one row; values that differ come before things that only some groups have."""
    columns = items.own().map(lambda group: grouped(group, lambda item: item.about))
    subjects = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows: list[Row] = []
    for about in subjects:
        items_about = [column.get(about, []) for column in columns]
        rows += side_by_side(items_about)
    return tuple(sorted(rows, key=lambda row: row.count(None)))


def _inserted(items: Items) -> list[Row]:
    """The first item of every longer group, where each begins with extra items and then goes on as the shortest."""
    length = min(map(len, items))
    has_longer = items.differ(len)
    if length == 0 or not has_longer:
        return []
    continued = items.map(lambda group: group[-length])
    skeletons = continued.map(_skeleton)
    if skeletons.differ():
        return []
    extra = items.map(lambda group: group[:-length])
    return [Row(extra.map(first))]


def _aligned(ours: Sequence[Item], theirs: Sequence[Item]) -> tuple[Row, ...]:
    """Rows of two groups: inserted, removed and changed items, then nodes that read different nodes."""
    matcher = SequenceMatcher(None, list(map(_skeleton, ours)), list(map(_skeleton, theirs)), autojunk=False)
    same: dict[str, str] = {}
    changed: list[Row] = []
    edges: list[Row] = []
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        rows = side_by_side([ours[a0:a1], theirs[b0:b1]])
        full = [row for row in rows if row.is_full]
        # Name of a node in one group -> its name in the other.
        same.update((row.present[0].about, row.present[1].about) for row in full)
        if tag == "equal":
            for row in full:  # nodes that do not read what is the same node in both groups
                reads = (item.notes.get("reads", "").split() for item in row.present)
                if any(same.get(our, our) != their for our, their in zip(*reads, strict=False)):
                    edges.append(row)
        else:
            changed += rows
    # An inserted node changes what later nodes read: a consequence, not a difference of its own.
    is_moved = not all(row.is_full for row in changed)
    return tuple(changed if is_moved else [*changed, *edges])


def _skeleton(item: Item) -> Hashable:
    """A node without the numbers of the nodes that it reads; any other item as it is."""
    if item.kind != ItemKind.NODE:
        return item.key
    fields = item.fields
    return fields["op"], fields["target"], item.notes.get("constants", fields["args"]), fields["value"]
