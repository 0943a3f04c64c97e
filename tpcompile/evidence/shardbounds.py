"""Guards and Dynamo graphs of several ranks -> Python integers that are the bounds of each rank's shard: healthy.

The vocabulary-parallel embeddings of Megatron and vLLM keep `start` and `end` of a rank's part as attributes, and torch
guards both. They are no difference where two guarded integers of one object cut a range into parts, each beginning
where that of the rank before ends, and where the program uses them to address data. Whatever else differs is one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tpcompile.evidence.bygroup import Items, Row
from tpcompile.evidence.byrank import Groups
from tpcompile.evidence.layerspec import Difference, Followed
from tpcompile.evidence.parametric import addresses, integer_columns
from tpcompile.evidence.records import Item, Layer
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.several import differ, grouped

_INTEGER = re.compile(r"^-?\d+$")
_MIN_SIZE = 2
"""A part of one element could be the rank itself."""

Column = tuple[int, ...]
"""One value for each group of ranks."""


def bounds_in_guards(difference: Difference) -> Followed:
    """Guards on the bounds of shards."""
    rows = list(_bounds(difference.items, difference.compile.coordinates()))
    return difference.following(rows, f"{len(rows)} guards hold the bounds of each rank's shard")


def bounds_in_program(difference: Difference) -> Followed:
    """Nodes of Dynamo graphs that address data by the bounds of shards."""
    if not difference.compile.differs(Layer.GUARDS):
        return Followed(difference.rows)
    guards = difference.compile.items(Layer.GUARDS)
    places = difference.compile.coordinates()
    known = {_column(row) for row in _bounds(guards, places)}
    addressing = [row for row in difference.rows if addresses(row)]
    rows = [row for row in addressing if known.issuperset(_differing(row))]
    return difference.following(rows, f"{len(rows)} node(s) address data by the bounds of each rank's shard")


def _bounds(guards: Items, places: Groups) -> Iterator[Row]:
    """Guards on the start and on the end of a part, of every object that has both."""
    rows = rows_of(guards, is_ordered=False)
    numbers = [row for row in rows if row.all_are(_is_integer)]
    by_object = grouped(numbers, lambda row: row.first.about.rpartition(".")[0])
    for of_object in by_object.values():
        for start, end in itertools.permutations(of_object, 2):
            starts, ends = _column(start), _column(end)
            if _is_partition(starts, ends, places):
                yield from (start, end)


def _is_integer(guard: Item) -> bool:
    return _INTEGER.match(guard.notes.get("value", "")) is not None


def _differing(row: Row) -> list[Column]:
    return [column for column in integer_columns(row) if differ(column)]


def _column(row: Row) -> Column:
    return tuple(map(int, row.notes("value")))


def _is_partition(starts: Column, ends: Column, places: Groups) -> bool:
    """True where `[start, end)` of the ranks, by coordinate, are the parts of one range; the last may be smaller."""
    in_order = sorted(zip(places, starts, ends, strict=True))
    places, starts, ends = zip(*in_order, strict=True)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    if places != tuple((number,) for number in range(len(places))) or starts != (0, *ends[:-1]):
        return False
    is_even = max(sizes) - min(sizes[:-1]) <= 1
    return is_even and min(sizes) >= _MIN_SIZE
