"""Rows in which ranks differ -> those that differ by nature: one map of the rank's coordinate gives them to all ranks.

A rank of a healthy program holds its own part of what is sharded, so the integers that *address* data follow its
coordinate: a bound, an offset, an index, the size of a shard. They are accepted where one map gives them to all ranks.
A constant that *scales* data, a float or a factor of a float tensor, changes the numbers and is always reported,
although the values of two ranks always fit a line.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.iterables import differ, first, grouped, indexed
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.node_text import called, nodes_in
from tpcompile.evidence.layers.spec import Affine, Difference, Followed, Parts
from tpcompile.evidence.records import Item, ItemKind, Layer

LOCAL_TENSOR = "._local_tensor"
_INTEGER = re.compile(r"(?<![\w.%#])-?\d+(?![\w.])")
_WHOLE = re.compile(r"-?\d+")
_ADDRESSING = re.compile(
    r"^(?:torch\.ops\.aten\.)?(?:lt|le|gt|ge|eq|ne|getitem|slice|slice_scatter|select|select_scatter|narrow|"
    r"as_strided|index_select|arange|constant_pad_nd|clamp|clamp_min|clamp_max|bitwise_\w+)\b"
)
_INTEGER_VALUE = re.compile(r"^(?:DTensor\()?[iub]\d+\[")
_SHAPE = re.compile(r"^(?:\w|\()*\w\[([^\]]*)\]")
"""The shape in what torch prints of a tensor: `f32[8, 16][16, 1]cpu`."""
_TAKES = frozenset({"getitem", "narrow", "select"})
_DIVIDES = frozenset({"chunk", "split", "tensor_split", "unbind"})
_MIN_SIZE = 2
"""Bounds of parts with one element could be the rank itself."""

Maps = Sequence[Affine | Parts]
Column = tuple[int, ...]
"""One integer for each group of ranks."""


def in_guards(difference: Difference) -> Followed:
    """Guards on shards of a dimension that the ranks do not divide, and on the bounds of shards."""
    places = difference.compile.coordinates()
    says = "guard(s) on shards of different sizes: the ranks do not divide the dimension"
    shards = _followed(difference.rows, lambda row: _sizes_of_shards(row, places), says)
    bounds = _bounds(difference.rows, places)
    order = {bound: number for number, bound in enumerate(bounds)}
    starts_first = sorted(shards.left, key=lambda row: order.get(_bound(row), len(order)))
    says = "guards hold the bounds of each rank's shard"
    bounded = shards.and_then(_followed(starts_first, lambda row: bounds.get(_bound(row), ()), says))
    if not bounded.left or not _takes_own_parts_alone(difference):
        return bounded
    says = "guard(s) hold the place by which the program takes each rank's own part"
    return bounded.and_then(_followed(bounded.left, lambda row: _place(row, places), says))


def _takes_own_parts_alone(difference: Difference) -> bool:
    """True where the graphs differ in nothing but what takes each rank's own part: `x.narrow(-1, rank * n, n)`.

    A rank that scales data, or chooses between branches, is in other nodes.
    """
    items = difference.compile.items(Layer.GRAPH)
    rows = rows_of(items, is_ordered=True)
    found = in_program(replace(difference, items=items, rows=tuple(rows)))
    return bool(found.rows) and not found.left


def _place(guard: Row, places: Groups) -> Maps:
    """The map of the coordinate that gives a guarded integer; empty for any other guard."""
    bound = _bound(guard)
    if bound is None or not _is_one_rank_each(places):
        return ()
    return _affine_maps([bound.values], [place for (place,) in places])


def in_program(difference: Difference) -> Followed:
    """Nodes of Dynamo graphs that address data by guarded bounds of shards, or that take the rank's own part."""
    places = difference.compile.coordinates()
    bounds: dict[Column, Maps] = {}
    if difference.compile.differs(Layer.GUARDS):
        guards = rows_of(difference.compile.items(Layer.GUARDS), is_ordered=False)
        bounds = {bound.values: parts for bound, parts in _bounds(guards, places).items() if bound}

    def by_bounds(row: Row) -> Maps:
        parts = [bounds.get(column, ()) for column in _addresses(row)]
        return list(itertools.chain.from_iterable(parts)) if all(parts) else ()

    bounded = _followed(difference.rows, by_bounds, "node(s) address data by the bounds of each rank's shard")
    if not _is_one_rank_each(places):
        return bounded
    graphs = [indexed(nodes, lambda node: node.about) for nodes in nodes_in(difference.items)]
    own = _OwnParts([place for (place,) in places], graphs)
    return bounded.and_then(_followed(bounded.left, own.maps, "node(s) take each rank's own part of a tensor"))


def constants(items: Items, coordinates: Groups) -> Followed:
    """Rows of lowered items that differ only in integers that are affine in the coordinate.

    `items[k]` are those of the ranks at `coordinates[k]`; every group must have exactly one rank. No row where anything
    else differs.
    """
    places = list(itertools.chain.from_iterable(coordinates))
    has_one_rank_each = len(places) == len(coordinates)
    if not has_one_rank_each or items.differ(len):
        return Followed(())
    says = "lowered constant(s) follow the rank's coordinate under equal Dynamo graphs"
    found = _followed(items.differing(), lambda row: _affine_maps(_addresses(row), places), says)
    return Followed(()) if found.left else found


def _followed(rows: Sequence[Row], maps_of: Callable[[Row], Maps], says: str) -> Followed:
    """The rows with maps of the coordinate, apart from those without."""
    followed: list[Row] = []
    left: list[Row] = []
    maps: list[Affine | Parts] = []
    for row in rows:
        found = maps_of(row)
        if found:
            followed.append(row)
            maps += found
        else:
            left.append(row)
    return Followed(left, followed, f"{len(followed)} {says}" if followed else "", tuple(dict.fromkeys(maps)))


# Integers that address data.


def _addresses(row: Row) -> list[Column]:
    """The integers in which nodes differ, where they address data; empty where anything else differs."""
    if not _is_one_op(row):
        return []
    target = row.first.fields["target"]
    value = row.first.fields["value"]
    selects = _ADDRESSING.match(target)
    computes_integers = _INTEGER_VALUE.search(value)
    return _differing_integers(row) if selects or computes_integers else []


def _is_one_op(row: Row) -> bool:
    """True for nodes of all ranks that differ in nothing but their arguments."""
    return row.all_are(lambda item: item.kind == ItemKind.NODE) and not row.differing(["op", "target", "value"])


def _differing_integers(row: Row) -> list[Column]:
    """The integers among the arguments in which nodes differ, by group; empty where the arguments differ otherwise."""
    if not row.agree_in(lambda node: _INTEGER.sub("#", node.fields["args"])):
        return []
    columns = zip(*(_integers(item.fields["args"]) for item in row.present), strict=True)
    return list(filter(differ, columns))


def _affine_maps(columns: Sequence[Column], places: Sequence[int]) -> Maps:
    found: list[Affine] = []
    for column in columns:
        affine = _affine(column, places)
        if affine is None:
            return ()
        found.append(affine)
    return found


def _integers(text: str) -> list[int]:
    """Integers in the text of arguments, without references to nodes."""
    return list(map(int, _INTEGER.findall(text)))


def _affine(values: Column, places: Sequence[int]) -> Affine | None:
    """The map that gives the value of every rank from its coordinate, exactly."""
    pairs = sorted(zip(places, values, strict=True))
    (x0, y0), (x1, y1) = pairs[0], pairs[-1]
    if x0 == x1:
        return None  # ranks that share a coordinate follow no map of it
    step = Fraction(y1 - y0, x1 - x0)
    start = y0 - step * x0
    is_exact = all(y == start + step * x for x, y in pairs)
    return Affine(start, step) if is_exact else None


# Sizes and bounds of shards.


def _sizes_of_shards(row: Row, coordinates: Groups) -> Maps:
    """The parts, for guards on the local tensor of a DTensor whose sharded dimension is not divisible by the ranks.

    They must be equal except for one size, split as `torch.chunk` does: whole chunks, then the rest, then nothing.
    """
    are_local = row.all_are(lambda guard: guard.about.endswith(LOCAL_TENSOR) and "size" in guard.notes)
    if not are_local or not row.agree_in(_without_sizes):
        return ()
    sizes = list(map(_integers, row.notes("size")))
    strides = list(map(_integers, row.notes("stride")))
    contiguous = [[math.prod(size[dim + 1 :]) for dim in range(len(size))] for size in sizes]
    is_same_layout = not differ(map(tuple, strides)) or strides == contiguous
    if differ(map(len, sizes)) or not is_same_layout:
        return ()
    uneven = list(filter(differ, zip(*sizes, strict=True)))
    if len(uneven) != 1:
        return ()
    size_at: dict[int, int] = {}
    for size, places in zip(uneven[0], coordinates, strict=True):
        size_at |= dict.fromkeys(places, size)
    in_order = [size_at[place] for place in sorted(size_at)]
    whole = list(filter(None, in_order))[:-1]
    is_chunked = in_order == sorted(in_order, reverse=True) and not differ(whole)
    return [Parts(tuple(in_order))] if is_chunked else ()


def _without_sizes(guard: Item) -> str:
    says, notes = guard.fields["expression"], guard.notes
    return says.replace(f"size=[{notes['size']}]", "").replace(f"stride=[{notes['stride']}]", "")


class _Bound(NamedTuple):
    source: str
    values: Column


def _bound(guard: Row) -> _Bound | None:
    """The guarded source with the integer of every group; None where a group has no integer there."""
    values = guard.notes("value")
    if not all(map(_WHOLE.fullmatch, values)):
        return None
    return _Bound(guard.first.about, tuple(map(int, values)))


def _bounds(guards: Sequence[Row], places: Groups) -> dict[_Bound | None, Maps]:
    """Guards on the start and on the end of a shard -> the parts, for every object that has both.

    The vocabulary-parallel embeddings of Megatron and vLLM keep them as attributes, and torch guards both.
    """
    integers = filter(None, map(_bound, guards))
    by_object = grouped(integers, lambda bound: bound.source.rpartition(".")[0])
    found: dict[_Bound | None, Maps] = {}
    for of_object in by_object.values():
        pairs = itertools.permutations(of_object, 2)
        for start, end in pairs:
            parts = _parts_between(start.values, end.values, places)
            if parts:
                found |= {start: parts, end: parts}
    return found


def _parts_between(starts: Column, ends: Column, places: Groups) -> Maps:
    """`[start, end)` of the ranks, by coordinate, where these are the parts of one range; the last may be smaller."""
    if not _is_one_rank_each(places):
        return ()
    in_order = sorted(zip(places, starts, ends, strict=True))
    sizes = tuple(end - start for _, start, end in in_order)
    starts = tuple(start for _, start, _ in in_order)
    ends = tuple(end for _, _, end in in_order)
    is_contiguous = starts == (0, *ends[:-1])
    is_even = max(sizes) - min(sizes[:-1]) <= 1
    if is_contiguous and is_even and min(sizes) >= _MIN_SIZE:
        return [Parts(sizes)]
    return ()


def _is_one_rank_each(places: Groups) -> bool:
    """True where every group is one rank, and all ranks of the domain are there."""
    return sorted(places) == [(place,) for place in range(len(places))]


@dataclass(frozen=True)
class _OwnParts:
    """Nodes that take the k-th of n equal parts of a tensor on the k-th of n ranks, or that read it.

    The backward of a gather, and a scatter of what every rank has: `x.chunk(n)[k]`, `x.narrow(dim, k * size, size)`,
    `x[..., k * size : (k + 1) * size]`, `x.view(n, -1)[k]`.
    """

    places: Sequence[int]
    graphs: Sequence[Mapping[str, Item]]
    """Name -> node, of the rank at each place."""

    def maps(self, row: Row) -> Maps:
        """The maps of the bounds, or the index, of the part of each rank; empty for any other row."""
        if not _is_one_op(row):
            return ()
        if row.differs_in_note("constants"):
            return self._of_part(row)
        found: list[Affine | Parts] = []
        names = zip(*(node.notes["reads"].split() for node in row.present), strict=True)
        for each in names:
            graphs = zip(self.graphs, each, strict=True)
            read = Row(graph.get(name) for graph, name in graphs)
            if read.agree_in(lambda node: node.about):
                continue
            maps = self._of_part(read) if _is_one_op(read) else ()
            if not maps:
                return ()
            found += maps
        return found

    def _of_part(self, row: Row) -> Maps:
        size = self._size(row.first)
        if size is None:
            return ()
        start, end = Affine(0, size), Affine(size, size)
        maps = _affine_maps(_differing_integers(row), self.places)
        return maps if maps in ([start], [start, end]) else ()

    def _size(self, node: Item) -> int | None:
        """Elements of one of n equal parts along a dimension, 1 for an index; None where it takes no such part."""
        source = self._read_by(node)
        if source is None or called(node) not in _TAKES:
            return None
        is_divided = called(source) in _DIVIDES
        whole = self._read_by(source) if is_divided else source
        if whole is None:
            return None
        size = _size_of_part(_shape(node), _shape(whole), len(self.graphs))
        is_index = is_divided and size is not None
        return 1 if is_index else size

    def _read_by(self, node: Item) -> Item | None:
        return first(filter(None, map(self.graphs[0].get, node.notes["reads"].split())))


def _shape(node: Item) -> list[str]:
    match = _SHAPE.match(node.fields["value"])
    return match[1].split(", ") if match else []


def _size_of_part(part: list[str], whole: list[str], num_parts: int) -> int | None:
    for dim, size in enumerate(whole):
        if not size.isdigit() or int(size) % num_parts:
            continue
        before, after = whole[:dim], whole[dim + 1 :]
        of_part = int(size) // num_parts
        if part == [*before, str(of_part), *after]:
            return of_part
        if part == [*before, *after] and of_part == 1:
            return 1
    return None
