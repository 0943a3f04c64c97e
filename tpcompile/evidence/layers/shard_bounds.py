"""Guards and Dynamo graphs of several ranks -> Python integers that are the bounds of each rank's shard: healthy.

The vocabulary-parallel embeddings of Megatron and vLLM keep `start` and `end` of a rank's shard as attributes, and
torch guards both. They are accepted where two guarded integers of one object divide a range into shards, each beginning
where that of the previous rank ends, and where the program uses them to address data. Any other difference is reported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.rank_parametric import addresses, integer_columns
from tpcompile.evidence.layers.spec import Difference, Followed
from tpcompile.evidence.records import Item, Layer

_INTEGER = re.compile(r"^-?\d+$")
_MIN_SIZE = 2
"""Bounds of shards with one element could be the rank itself."""

Column = tuple[int, ...]
"""One value for each group of ranks."""


def bounds_in_guards(difference: Difference) -> Followed:
    """Guards on the bounds of shards."""
    rows = _bounds(difference.items, difference.compile.coordinates())
    return difference.following(rows, f"{len(rows)} guards hold the bounds of each rank's shard")


def bounds_in_program(difference: Difference) -> Followed:
    """Nodes of Dynamo graphs that address data by the bounds of shards."""
    if not difference.compile.differs(Layer.GUARDS):
        return Followed(difference.rows)
    guards = difference.compile.items(Layer.GUARDS)
    places = difference.compile.coordinates()
    bounds = set(map(_column, _bounds(guards, places)))
    rows = [row for row in difference.rows if _is_addressed_by(row, bounds)]
    return difference.following(rows, f"{len(rows)} node(s) address data by the bounds of each rank's shard")


def _bounds(guards: Items, places: Groups) -> list[Row]:
    """Guards on the start and on the end of a shard, of every object that has both."""
    found: list[Row] = []
    for start, end in _pairs_of_integers(guards):
        starts = _column(start)
        ends = _column(end)
        if _is_partition(starts, ends, places):
            found += [start, end]
    return found


def _pairs_of_integers(guards: Items) -> Iterator[tuple[Row, Row]]:
    """Guards on two integers of one object, both ways round."""
    rows = rows_of(guards, is_ordered=False)
    integers = [row for row in rows if row.all_are(_is_integer)]
    by_object = grouped(integers, lambda row: row.first.about.rpartition(".")[0])
    for of_object in by_object.values():
        yield from itertools.permutations(of_object, 2)


def _is_addressed_by(row: Row, bounds: set[Column]) -> bool:
    """True for nodes that differ in integers which address data and are all bounds of shards."""
    return addresses(row) and bounds.issuperset(_differing(row))


def _is_integer(guard: Item) -> bool:
    return _INTEGER.match(guard.notes.get("value", "")) is not None


def _differing(row: Row) -> list[Column]:
    return [column for column in integer_columns(row) if differ(column)]


def _column(row: Row) -> Column:
    return tuple(map(int, row.notes("value")))


def _is_partition(starts: Column, ends: Column, places: Groups) -> bool:
    """True where `[start, end)` of the ranks, by coordinate, are the parts of one range; the last may be smaller."""
    parts = sorted(zip(places, starts, ends, strict=True))
    places, starts, ends = zip(*parts, strict=True)
    sizes = [end - start for _, start, end in parts]
    has_one_rank_each = list(itertools.chain.from_iterable(places)) == list(range(len(parts)))
    is_contiguous = starts == (0, *ends[:-1])
    if not (has_one_rank_each and is_contiguous):
        return False
    is_even = max(sizes) - min(sizes[:-1]) <= 1
    is_large_enough = min(sizes) >= _MIN_SIZE
    return is_even and is_large_enough
