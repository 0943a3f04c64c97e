"""Items of a layer, one tuple per group of ranks -> the rows in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from tpcompile.evidence.groups.by_group import ByGroup, Items, Row, side_by_side
from tpcompile.evidence.iterables import first, grouped
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
    return _by_position(rest)


def first_difference(groups: Iterable[Sequence[Item]]) -> int:
    """The first position at which the groups differ; the shortest group may end there."""
    columns = map(Row, zip(*groups, strict=False))
    return len(list(itertools.takewhile(lambda row: not row.differs, columns)))


def _rows_by_subject(items: Items) -> tuple[Row, ...]:
    """Items about the same thing in one row; values that differ come before things that only some groups have."""
    columns = items.own().map(lambda group: grouped(group, lambda item: item.about))
    subjects = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows = [row for about in subjects for row in _about(columns, about)]
    return tuple(sorted(rows, key=lambda row: row.count(None)))


def _about(columns: ByGroup[dict[str, list[Item]]], about: str) -> list[Row]:
    return side_by_side(columns.map(lambda column: column.get(about, [])))


def _by_position(items: Items) -> tuple[Row, ...]:
    """Rows of more than two groups: an item that only some have, or else the items at the same position."""
    return tuple(_inserted(items) or items.differing())


def _inserted(items: Items) -> list[Row]:
    """The first item of every longer group, where each begins with extra items and then goes on as the shortest."""
    length = min(map(len, items))
    has_longer = items.differ(len)
    if length == 0 or not has_longer:
        return []
    goes_on_alike = not items.differ(lambda group: _skeleton(group[-length]))
    if not goes_on_alike:
        return []
    extra = items.map(lambda group: first(group[:-length]))
    return [Row(extra)]


def _aligned(ours: Sequence[Item], theirs: Sequence[Item]) -> tuple[Row, ...]:
    """Rows of two groups: inserted, removed and changed items, then nodes that read different nodes."""
    matcher = SequenceMatcher(None, list(map(_skeleton, ours)), list(map(_skeleton, theirs)), autojunk=False)
    same: dict[str, str] = {}
    changed: list[Row] = []
    edges: list[Row] = []
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        rows = side_by_side([ours[a0:a1], theirs[b0:b1]])
        same.update(_places(rows))
        if tag == "equal":
            edges += [row for row in rows if not _reads_the_same(row, same)]
        else:
            changed += rows
    # An inserted node changes what later nodes read: a consequence, not a difference of its own.
    is_moved = not all(row.is_full for row in changed)
    return tuple(changed if is_moved else [*changed, *edges])


def _places(rows: Iterable[Row]) -> Mapping[str, str]:
    """Name of a node in one group -> its name in the other."""
    pairs = [row.present for row in rows if row.is_full]
    return {ours.about: theirs.about for ours, theirs in pairs}


def _skeleton(item: Item) -> Hashable:
    """A node without the numbers of the nodes that it reads; any other item as it is."""
    if item.kind != ItemKind.NODE:
        return item.key
    fields = item.fields
    return fields["op"], fields["target"], item.notes.get("constants", fields["args"]), fields["value"]


def _reads_the_same(row: Row, same: Mapping[str, str]) -> bool:
    ours, theirs = map(_references, row.present)
    return all(same.get(a, a) == b for a, b in zip(ours, theirs, strict=False))


def _references(item: Item) -> list[str]:
    return item.notes.get("reads", "").split()
