"""Items of a layer, one tuple per group of ranks -> the rows in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from tpcompile.evidence.bygroup import ByGroup, Items, Row, side_by_side
from tpcompile.evidence.records import Item, ItemKind
from tpcompile.evidence.several import grouped

_WINDOW = 300
"""Items compared behind the first difference: what differs first is the finding, and aligning is quadratic."""


def rows_of(items: Items, *, is_ordered: bool) -> tuple[Row, ...]:
    """Rows of items, one per group, wherever the groups do not all say the same."""
    if not is_ordered:
        return _rows_by_subject(items)
    start = first_difference(items)
    rest = Items(group[start : start + _WINDOW] for group in items)
    return _aligned(*rest) if len(rest) == 2 else _by_position(rest)


def first_difference(groups: Iterable[Sequence[Item]]) -> int:
    """The first place at which the groups do not say the same; one may end there."""
    columns = map(Row, zip(*groups, strict=False))
    return len(list(itertools.takewhile(lambda row: not row.differs, columns)))


def _rows_by_subject(items: Items) -> tuple[Row, ...]:
    """Items about the same thing in one row; a value that differs comes before a thing that only one side has."""
    columns = items.own().map(lambda group: grouped(group, lambda item: item.about))
    subjects = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows = [row for about in subjects for row in _about(columns, about)]
    return tuple(sorted(rows, key=lambda row: row.count(None)))


def _about(columns: ByGroup[dict[str, list[Item]]], about: str) -> list[Row]:
    return side_by_side(columns.map(lambda column: column.get(about, [])))


def _by_position(items: Items) -> tuple[Row, ...]:
    """Of more than two groups: the item that some have more, or else what stands at the same place."""
    return tuple(_inserted(items) or items.differing())


def _inserted(items: Items) -> list[Row]:
    """The first item, where every longer group has more before what the shorter ones begin with; else nothing."""
    length = min(map(len, items))
    has_longer = items.differ(len)
    if not length or not has_longer:
        return []
    if items.differ(lambda group: _skeleton(group[-length])):
        return []
    extra = [group[0] if len(group) > length else None for group in items]
    return [Row(extra)]


def _aligned(ours: Sequence[Item], theirs: Sequence[Item]) -> tuple[Row, ...]:
    """Rows of two groups after inserted and removed items are taken out, and edges that lead elsewhere."""
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
    # What is inserted moves edges: that is its consequence.
    is_moved = not all(row.is_full for row in changed)
    return tuple(changed if is_moved else [*changed, *edges])


def _places(rows: Iterable[Row]) -> Mapping[str, str]:
    """Place of a node on one side -> its place on the other."""
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
