"""Dynamo graphs of several ranks -> nodes that take the rank's own part of a tensor that all of them hold: healthy.

The backward of a gather, and a scatter of what every rank has, take the k-th of n parts on the k-th of n ranks:
`x.chunk(n)[k]`, `x.narrow(dim, k * size, size)`, `x[..., k * size : (k + 1) * size]`, `x.view(n, -1)[k]`. That is
accepted where each rank takes the part of its coordinate, and the parts are equal and together the whole dimension.
Any other constant or tensor that differs is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.iterables import differ, first, indexed
from tpcompile.evidence.layers.node_text import called, nodes_in
from tpcompile.evidence.layers.rank_parametric import integer_columns, is_same_call
from tpcompile.evidence.layers.spec import Difference, Followed
from tpcompile.evidence.records import Item, ItemKind

_TAKES = frozenset({"getitem", "narrow", "select"})
_DIVIDES = frozenset({"chunk", "split", "tensor_split", "unbind"})
_SHAPE = re.compile(r"^(?:\w|\()*\w\[([^\]]*)\]")
"""Of what torch prints of a tensor: `f32[8, 16][16, 1]cpu`."""

Nodes = Mapping[str, Item]
"""Name -> node, of one rank."""


def own_parts(difference: Difference) -> Followed:
    """Nodes that take, or read, the part of this rank."""
    if not _is_one_rank_each(difference.compile.coordinates()):
        return Followed(difference.rows)
    rows = list(filter(_domain_of(difference).is_own, difference.rows))
    return difference.following(rows, f"{len(rows)} node(s) take each rank's own part of a tensor")


def _is_one_rank_each(places: Groups) -> bool:
    """True where every group is one rank, and all ranks of the domain are there."""
    return sorted(places) == [(place,) for place in range(len(places))]


def _domain_of(difference: Difference) -> _Domain:
    graphs = list(map(_by_name, nodes_in(difference.items)))
    return _Domain(graphs, [place for (place,) in difference.compile.coordinates()])


def _by_name(nodes: Sequence[Item]) -> Nodes:
    return indexed(nodes, lambda node: node.about)


@dataclass(frozen=True)
class _Domain:
    """The graph and the coordinate of every rank."""

    graphs: Sequence[Nodes]
    places: Sequence[int]

    def is_own(self, row: Row) -> bool:
        """True for one op that takes the part of each rank, or that reads it."""
        if not _is_one_op(row):
            return False
        takes = row.differs_in_note("constants")
        return self._takes_part(row) if takes else all(map(self._is_own_or_equal, self._read_by(row)))

    def _read_by(self, row: Row) -> list[Row]:
        """The nodes that a node reads, a row for each."""
        names = zip(*map(_reads, row.present), strict=True)
        return [Row(graph.get(name) for graph, name in zip(self.graphs, each, strict=True)) for each in names]

    def _is_own_or_equal(self, row: Row) -> bool:
        if row.agree_in(lambda item: item.about):
            return True
        return _is_one_op(row) and self._takes_part(row)

    def _takes_part(self, row: Row) -> bool:
        """True where the integers in which the ranks differ are the bounds, or the index, of the part of each."""
        differing = list(filter(differ, integer_columns(row))) if is_same_call(row) else []
        size = _size_of_part(row.first, self.graphs[0], len(self.graphs))
        return bool(differing) and size is not None and differing in self._bounds(size)

    def _bounds(self, size: int) -> list[list[tuple[int, ...]]]:
        starts = tuple(place * size for place in self.places)
        ends = tuple(start + size for start in starts)
        return [[starts], [starts, ends]]


def _is_one_op(row: Row) -> bool:
    """True for nodes of all ranks that differ in nothing but their arguments."""
    are_nodes = row.all_are(lambda item: item.kind == ItemKind.NODE)
    return are_nodes and not row.differing(["op", "target", "value"])


def _reads(node: Item) -> list[str]:
    return node.notes["reads"].split()


def _first_read(node: Item, graph: Nodes) -> Item | None:
    return first(filter(None, map(graph.get, _reads(node))))


def _size_of_part(node: Item, graph: Nodes, num_parts: int) -> int | None:
    """Elements along a dimension of one of so many equal parts, 1 for an index; None where it takes no such part."""
    source = _first_read(node, graph) if called(node) in _TAKES else None
    if source is None or called(source) not in _DIVIDES:
        return _size_of(node, source, num_parts)
    return _size_of(node, _first_read(source, graph), num_parts) and 1


def _size_of(part: Item, whole: Item | None, num_parts: int) -> int | None:
    parts = _parts_of(_shape(whole), num_parts) if whole else ()
    return first(size for size, shape in parts if shape == _shape(part))


def _shape(node: Item) -> list[str]:
    match = _SHAPE.match(node.fields["value"])
    return match[1].split(", ") if match else []


def _parts_of(shape: list[str], num_parts: int) -> Iterator[tuple[int, list[str]]]:
    """(elements along the dimension, shape) of each form that one of so many equal parts can have; 1 for an index."""
    whole = str(num_parts)
    for dim in _divisible(shape, num_parts):
        before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
        of_part = int(size) // num_parts
        yield of_part, [*before, str(of_part), *after]
        if size == whole:
            yield 1, [*before, *after]


def _divisible(shape: list[str], num_parts: int) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size.isdigit() and int(size) % num_parts == 0]
