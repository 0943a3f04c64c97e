"""Items of a layer, one tuple per group of ranks -> the rows in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from operator import attrgetter, methodcaller

from tpcompile.evidence.layerspec import Items, Row
from tpcompile.evidence.records import Item, ItemKind
from tpcompile.evidence.several import differ, grouped

_WINDOW = 300
"""Items compared behind the first difference: what differs first is the finding, and aligning is quadratic."""


def rows_of(items: Items, *, is_ordered: bool) -> tuple[Row, ...]:
    """Rows of items, one per group, wherever the groups do not all say the same."""
    if not is_ordered:
        return _rows_by_subject(items)
    start = first_difference(items)
    rest = tuple(group[start : start + _WINDOW] for group in items)
    return _aligned(*rest) if len(rest) == 2 else _by_position(rest)


def common_keys(items: Items) -> set[tuple[str, ...]]:
    """Keys of the items that every group has."""
    return set.intersection(*map(set, map(keys, items)))


def keys(group: Sequence[Item]) -> tuple[tuple[str, ...], ...]:
    """Keys of the items of one group, in order."""
    return tuple(item.key for item in group)


def first_difference(items: Items) -> int:
    """The first place at which the groups do not say the same; one may end there."""
    columns = map(Row, zip(*items, strict=False))
    return len(list(itertools.takewhile(lambda row: not row.differs, columns)))


def own_items(items: Items) -> Items:
    """Of each group what not all groups have."""
    common = common_keys(items)
    return tuple(tuple(item for item in group if item.key not in common) for group in items)


def _rows_by_subject(items: Items) -> tuple[Row, ...]:
    """Items about the same thing in one row; a value that differs comes before a thing that only one side has."""
    columns = [grouped(group, attrgetter("about")) for group in own_items(items)]
    subjects = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows = [row for about in subjects for row in _side_by_side(map(methodcaller("get", about, ()), columns))]
    return tuple(sorted(rows, key=lambda row: row.count(None)))


def differing_places(items: Items) -> list[Row]:
    """Rows of groups with equally many items, by position, where they differ."""
    return list(filter(attrgetter("differs"), _side_by_side(items)))


def _side_by_side(columns: Iterable[Sequence[Item]]) -> Iterator[Row]:
    return map(Row, itertools.zip_longest(*columns))


def _by_position(items: Items) -> tuple[Row, ...]:
    """Of more than two groups: the item that some have more, or else what stands at the same place."""
    return tuple(_inserted(items) or differing_places(items))


def _inserted(items: Items) -> list[Row]:
    """The first item, where every longer group has more before what the shorter ones begin with; else nothing."""
    length = len(min(items, key=len))
    if not length or not differ(map(len, items)):
        return []
    continued = [group[len(group) - length] for group in items]
    if differ(map(_skeleton, continued)):
        return []
    return [Row(group[0] if len(group) > length else None for group in items)]


def _aligned(ours: Sequence[Item], theirs: Sequence[Item]) -> tuple[Row, ...]:
    """Rows of two groups after inserted and removed items are taken out, and edges that lead elsewhere."""
    matcher = SequenceMatcher(None, list(map(_skeleton, ours)), list(map(_skeleton, theirs)), autojunk=False)
    same: dict[str, str] = {}
    changed: list[Row] = []
    edges: list[Row] = []
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        rows = list(_side_by_side([ours[a0:a1], theirs[b0:b1]]))
        same.update(_places(rows))
        if tag == "equal":
            edges += [row for row in rows if not _reads_the_same(row, same)]
        else:
            changed += rows
    # What is inserted moves edges: that is its consequence.
    is_moved = not all(map(attrgetter("is_full"), changed))
    return tuple(changed if is_moved else [*changed, *edges])


def _places(rows: Iterable[Row]) -> dict[str, str]:
    """Place of a node on one side -> its place on the other."""
    pairs = map(attrgetter("present"), filter(attrgetter("is_full"), rows))
    return {ours.about: theirs.about for ours, theirs in pairs}


def _skeleton(item: Item) -> Hashable:
    """A node without the numbers of the nodes that it reads; any other item as it is."""
    if item.kind != ItemKind.NODE:
        return item.key
    fields = item.fields
    return fields["op"], fields["target"], item.notes.get("constants", fields["args"]), fields["value"]


def _reads_the_same(row: Row, same: dict[str, str]) -> bool:
    ours, theirs = map(_references, row.present)
    return all(same.get(a, a) == b for a, b in zip(ours, theirs, strict=False))


def _references(item: Item) -> list[str]:
    return item.notes.get("reads", "").split()
