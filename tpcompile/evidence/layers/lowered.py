"""Graphs that AOTAutograd made from the Dynamo graph, forward and backward -> one item per node."""

from __future__ import annotations

from collections.abc import Iterator

from tpcompile.evidence.layers.collectives import issued
from tpcompile.evidence.layers.equivalent import constants
from tpcompile.evidence.layers.graph import graph_items
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, Followed, LayerSpec
from tpcompile.evidence.records import CompileRecord, Item, Layer
from tpcompile.evidence.records.causes import Cause

_KINDS = {"forward": ("forward", "inference"), "backward": ("backward",)}
"""Part of the layer -> kinds of its graphs."""


def _items(compile_: CompileRecord, part: str) -> Iterator[Item]:
    for graph in compile_.graphs_of(*_KINDS[part]):
        yield from graph_items(graph)


def _explain(difference: Difference) -> Explanation:
    collectives = issued(difference)
    if collectives is not None:
        return collectives
    targets = difference.items.each(lambda item: item.fields["target"])
    num_padded = targets.map(lambda own: " ".join(own).count("constant_pad_nd"))
    outputs = difference.items.only(lambda item: item.fields["op"] == "output")
    saved = outputs.each(lambda item: item.notes["reads"])
    num_saved = saved.map(lambda own: len(" ".join(own).split()))
    cause = Cause.COMPILER_PASS
    if num_padded.differ():
        cause = Cause.AUTOTUNE  # Inductor decides by timing, on each rank alone, whether padding makes a matmul faster
    elif num_saved.differ():
        cause = Cause.PARTITIONER
    return Explanation(cause, Directness.LOWERED, difference.rows[0])


def _follow(difference: Difference) -> Followed:
    """Constants that follow the coordinate, where nothing else differs and the collectives are equal."""
    found = constants(difference.items, difference.compile.coordinates())
    if difference.compile.differs(Layer.COLLECTIVES) or not found.rows:
        return Followed(difference.rows)
    return found


SPEC = LayerSpec(
    explain=_explain,
    items=_items,
    parts=lambda compile_: [part for part, kinds in _KINDS.items() if compile_.graphs_of(*kinds)],
    follow=_follow,
    is_strict=False,
)
