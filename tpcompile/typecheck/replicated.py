"""Rows of a shard that neighbouring ranks hold too, through slices, reshapes and concatenations along the sharded dim.

A kv head that two ranks share is packed behind the query heads that each has alone, so the rows are a span of the dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from tpcompile.layout import ShardSpec
from tpcompile.typecheck.spmd import SpmdType
from tpcompile.typecheck.step import Step

Span = tuple[int, int]


def declared_rows(spec: ShardSpec, tp: int) -> Span | None:
    """The span of a declared layout, in the rows of one rank; None when all ranks have different rows."""
    if all(part.replicas == 1 for part in spec.packed):
        return None
    ends = list(accumulate(part.share(tp) for part in spec.packed))
    spans = zip([0, *ends], ends, spec.packed, strict=False)
    shared = [(start, end) for start, end, part in spans if part.replicas > 1]
    return shared[0][0], shared[-1][1]


def parts_of(step: Step, shard: SpmdType, x: Tensor, dim: int) -> list[SpmdType]:
    """The type of each part that a slice or split along the sharded dim makes, with its share of the span."""
    sizes = [part.shape[dim] for part in step.results]
    begin = 0
    if step.name in ("aten.slice", "aten.narrow"):
        begin = step.arg(2, "start", 0) or 0
        begin = min(begin + x.shape[dim] if begin < 0 else begin, x.shape[dim])
    starts = [begin, *(begin + end for end in accumulate(sizes))]
    span, parts = shard.replicated_rows, []
    for start, size in zip(starts, sizes, strict=False):
        rows = None
        if span is not None:
            first, last = max(span[0] - start, 0), min(span[1] - start, size)
            rows = (first, last) if first < last else None
        parts.append(replace(shard, replicated_rows=rows))
    return parts


def joined_rows(tensors: Sequence[Tensor], types: Sequence[SpmdType], dim: int) -> Span | None:
    """The span in a concatenation along the sharded dim; from the first to the last such row."""
    starts = [0, *accumulate(tensor.shape[dim] for tensor in tensors)]
    spans = [
        (start + type_.replicated_rows[0], start + type_.replicated_rows[1])
        for start, type_ in zip(starts, types, strict=False)
        if type_.replicated_rows is not None
    ]
    return (spans[0][0], spans[-1][1]) if spans else None


def reshaped_rows(shard: SpmdType, old_size: int, new_size: int) -> SpmdType:
    """A span stays while the dim does, or while it is the whole dim; others are not followed."""
    if shard.replicated_rows is None or old_size == new_size:
        return shard
    is_whole = shard.replicated_rows == (0, old_size)
    return replace(shard, replicated_rows=(0, new_size) if is_whole else None)
