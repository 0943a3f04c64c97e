"""Graphs that AOTAutograd made of the program, forward and backward -> one item per node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.layers.collectives import issued
from tpcompile.evidence.layers.graph import graph_items
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, LayerSpec
from tpcompile.evidence.parametric import lowered_constants
from tpcompile.evidence.records import CompileRecord, Graph, Item, Layer

_PARTS = {"forward": "forward", "inference": "forward", "backward": "backward"}


def _of_part(compile_: CompileRecord, part: str) -> list[Graph]:
    return [graph for graph in compile_.graphs if _PARTS.get(graph.kind) == part]


def _items(compile_: CompileRecord, part: str) -> Iterator[Item]:
    for graph in _of_part(compile_, part):
        yield from graph_items(graph)


def _parts(compile_: CompileRecord) -> Sequence[str]:
    return [part for part in ("forward", "backward") if _of_part(compile_, part)]


def _explain(difference: Difference) -> Explanation:
    collectives = issued(difference)
    if collectives is not None:
        return collectives
    return Explanation(_cause(difference), Directness.LOWERED, difference.rows[0])


def _cause(difference: Difference) -> Cause:
    padded = [_count(group, "constant_pad_nd") for group in difference.items]
    if len(set(padded)) > 1:
        return Cause.AUTOTUNE  # Inductor times whether padding a matmul makes it faster, each rank for itself
    saved = [_num_saved(group) for group in difference.items]
    return Cause.PARTITIONER if len(set(saved)) > 1 else Cause.COMPILER_PASS


def _count(items: Sequence[Item], op: str) -> int:
    return sum(op in item.fields["target"] for item in items)


def _num_saved(items: Sequence[Item]) -> int:
    outputs = [item for item in items if item.fields["op"] == "output"]
    return sum(len(item.notes["reads"].split()) for item in outputs)


SPEC = LayerSpec(
    layer=Layer.LOWERED, explain=_explain, items=_items, parts=_parts, follow=lowered_constants, is_strict=False
)
