"""Items of a layer, one tuple per group of ranks -> the rows in which they differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest

from tpcompile.evidence.layerspec import Items, Row
from tpcompile.evidence.records import Item, ItemKind

_WINDOW = 300
"""Items compared behind the first difference: what differs first is the finding, and aligning is quadratic."""


def rows_of(items: Items, *, is_ordered: bool) -> tuple[Row, ...]:
    """Rows of items, one per group, wherever the groups do not all say the same."""
    if not is_ordered:
        return _rows_by_subject(items)
    start = _first_difference(items)
    rest = tuple(group[start : start + _WINDOW] for group in items)
    return _aligned(*rest) if len(rest) == 2 else _by_position(rest)


def _rows_by_subject(items: Items) -> tuple[Row, ...]:
    """Items about the same thing in one row; a value that differs comes before a thing that only one side has."""
    common = set.intersection(*({item.key for item in group} for group in items))
    about: dict[str, list[list[Item]]] = {}
    for position, group in enumerate(items):
        for item in group:
            if item.key not in common:
                columns = about.setdefault(item.about, [[] for _ in items])
                columns[position].append(item)
    rows = [row for columns in about.values() for row in zip_longest(*columns)]
    return tuple(sorted(rows, key=lambda row: row.count(None)))


def _first_difference(items: Items) -> int:
    for index, column in enumerate(zip(*items, strict=False)):
        if len({item.key for item in column}) > 1:
            return index
    return min(len(group) for group in items)


def _by_position(items: Items) -> tuple[Row, ...]:
    """Of more than two groups: the item that some have more, or else what stands at the same place."""
    inserted = _inserted(items)
    if inserted is not None:
        return (inserted,)
    columns = zip_longest(*items)
    return tuple(column for column in columns if len({item and item.key for item in column}) > 1)


def _inserted(items: Items) -> Row | None:
    """The first item, where every longer group has one more before what the shorter ones begin with."""
    shortest = min(items, key=len)
    if not shortest or len({len(group) for group in items}) == 1:
        return None
    begin = _skeleton(shortest[0])
    row: list[Item | None] = []
    for group in items:
        extra = len(group) - len(shortest)
        if _skeleton(group[min(extra, len(group) - 1)]) != begin:
            return None
        row.append(group[0] if extra else None)
    return tuple(row)


def _aligned(ours: Sequence[Item], theirs: Sequence[Item]) -> tuple[Row, ...]:
    """Rows of two groups after inserted and removed items are taken out, and edges that lead elsewhere."""
    matcher = SequenceMatcher(None, [_skeleton(i) for i in ours], [_skeleton(i) for i in theirs], autojunk=False)
    same: dict[str, str] = {}
    rows: list[Row] = []
    edges: list[Row] = []
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        pairs = list(zip_longest(ours[a0:a1], theirs[b0:b1]))
        same.update({a.about: b.about for a, b in pairs if a and b})
        if tag != "equal":
            rows += pairs
            continue
        edges += [(a, b) for a, b in pairs if a and b and not _reads_the_same(a, b, same)]
    # What is inserted moves edges: that is its consequence.
    is_moved = any(None in row for row in rows)
    return tuple(rows if is_moved else [*rows, *edges])


def _skeleton(item: Item) -> Hashable:
    """A node without the numbers of the nodes that it reads; any other item as it is."""
    if item.kind != ItemKind.NODE:
        return item.key
    fields = item.fields
    return fields["op"], fields["target"], item.notes.get("constants", fields["args"]), fields["value"]


def _reads_the_same(ours: Item, theirs: Item, same: dict[str, str]) -> bool:
    references = zip(_references(ours), _references(theirs), strict=False)
    return all(same.get(a, a) == b for a, b in references)


def _references(item: Item) -> list[str]:
    return item.notes.get("reads", "").split()
