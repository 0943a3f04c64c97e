"""Sharded dim of an input -> sharded dim of a view, slice, reshape or concatenation of it.

Only a V with a known dim changes type here: a partial or replicated tensor has the same type in every view.
Rows of a shard that neighbouring ranks hold too are followed with it. A kv head that two ranks share is packed behind
the query heads that each has alone, so these rows are a span of the dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from tpcompile.layout import ShardSpec
from tpcompile.typecheck import wording
from tpcompile.typecheck.ops import PACKS
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, Kind, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, rule

View = Callable[[Step, SpmdType, Tensor], Result]
Rows = tuple[int, int]


def view(*names: str) -> Callable[[View], View]:
    """Register a function that moves a known shard; every result gets the same type unless it returns one for each."""

    def register(function: View) -> View:
        def judge(step: Step) -> Result:
            x, shard = step.args[0], step.type_at(0)
            return function(step, shard, x) if shard.is_known_shard else shard

        judge.__doc__ = function.__doc__
        rule(*names)(judge)
        return function

    return register


class _Span(NamedTuple):
    """One dim of a shape, as a span of the elements in their order."""

    dim: int
    before: int
    """Product of the sizes of the dims in front of it."""
    after: int
    """The same including this dim."""


def _spans(shape: Sequence[int]) -> list[_Span]:
    totals = [math.prod(shape[:dim]) for dim in range(len(shape) + 1)]
    return [_Span(dim, totals[dim], totals[dim + 1]) for dim in range(len(shape))]


def _ones_at(start: int, shape: Sequence[int]) -> int:
    """Number of dims of size 1 that begin at `start`."""
    return sum(span.before == span.after == start for span in _spans(shape))


def reshaped(shard: SpmdType, old: Sequence[int], new: Sequence[int]) -> SpmdType:
    """Follow a shard through a reshape of contiguous dims; the leftmost part of a split dim is the sharded one.

    A new dim of size 1 in front of it may be the sharded one as well (one head per rank), so the dim is then unknown.
    """
    assert shard.dim is not None
    start = math.prod(old[: shard.dim]) * shard.left
    local = old[shard.dim] // (shard.left * shard.right)
    if 0 in new or local == 0:
        return shard.with_dim(None)
    if local == 1:
        # It is the only dim of size 1 at its place, or was merged into the dim that begins there.
        beginning = [span for span in _spans(new) if span.before == start]
        if not beginning or _ones_at(start, new) > 1:
            return shard.with_dim(None)
        first = beginning[0]
        return shard.with_dim(first.dim, 1, first.after // first.before)
    if _ones_at(start, new) > _ones_at(start, old[: shard.dim]):
        return shard.with_dim(None)
    for span in _spans(new):
        is_inside = span.before <= start < span.after
        begins_a_part = start % span.before == 0 and span.after % start == 0
        if is_inside and begins_a_part:
            right = max(1, span.after // (start * local))
            return shard.with_dim(span.dim, start // span.before, right)
    return shard.with_dim(None)


@view("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unflatten", "aten.flatten")
def _view(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """The same elements in a different shape; replicated rows stay while the dim does, or while they are all of it."""
    if x.dtype != step.out.dtype:
        return shard.with_dim(None)
    found = reshaped(shard, x.shape, step.out.shape)
    if shard.dim is None or found.dim is None or found.replicated_rows is None:
        return found
    size, new_size = x.shape[shard.dim], step.out.shape[found.dim]
    if size == new_size:
        return found
    is_all_of_it = shard.replicated_rows == (0, size)
    return replace(found, replicated_rows=(0, new_size) if is_all_of_it else None)


@view("aten.permute", "aten.movedim", "aten.transpose", "aten.t", "aten.unsqueeze", "aten.expand")
def _reordered(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """The shard after dims were put in a new order, or new ones were added; movedim is not followed."""
    if step.name == "aten.movedim":
        return shard.with_dim(None)
    # For each dim of the result, the dim of `x` that it is; None for a new one.
    order: list[int | None] = list(range(x.dim()))
    if step.name == "aten.permute":
        order = [dim % x.dim() for dim in step.arg(1, "dims")]
    elif step.name == "aten.t":
        order.reverse()
    elif step.name == "aten.transpose":
        first, second = step.arg(1, "dim0"), step.arg(2, "dim1")
        order[first], order[second] = order[second], order[first]
    elif step.name == "aten.unsqueeze":
        order.insert(step.arg(1, "dim") % (x.dim() + 1), None)
    else:  # expand adds dims in front
        order = [*[None] * (step.out.dim() - x.dim()), *order]
    if shard.dim not in order:
        return shard.with_dim(None)
    return replace(shard, dim=order.index(shard.dim))


def without_dims(shard: SpmdType, dims: set[int]) -> SpmdType:
    """The shard after these dims were removed."""
    if shard.dim is None or shard.dim in dims:
        return shard.with_dim(None)
    num_removed_in_front = sum(d < shard.dim for d in dims)
    return replace(shard, dim=shard.dim - num_removed_in_front)


@view("aten.squeeze", "aten.select", "aten.unbind")
def _removed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims removed: one, of which every rank has other slices, or those of size 1 of all or of the named dims."""
    if step.name != "aten.squeeze":
        return without_dims(shard, {step.dim_at(1)})
    named = step.arg(1, "dim", range(x.dim()))
    dims = [named] if isinstance(named, int) else named
    return without_dims(shard, {d % x.dim() for d in dims if x.shape[d] == 1})


@view("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow", "aten.unsafe_split")
def _sliced(step: Step, shard: SpmdType, x: Tensor) -> Result:
    """A part of the local shard is still sharded on that dim; of a merged dim, only one index of what is in front."""
    is_slice = step.name in ("aten.slice", "aten.narrow")
    dim = step.dim_at(1 if is_slice else 2)
    if dim != shard.dim:
        return shard
    sizes = [part.shape[dim] for part in step.results]
    is_one_index = set(sizes) == {x.shape[dim] // shard.left}
    is_shard = shard.left == 1 or is_one_index
    part = shard.with_dim(dim if is_shard else None)
    begin = 0
    if is_slice:
        begin = step.arg(2, "start", 0) or 0
        begin = min(begin + x.shape[dim] if begin < 0 else begin, x.shape[dim])
    ends = [begin + end for end in accumulate(sizes)]
    return [
        replace(part, replicated_rows=_rows_within(part.replicated_rows, start, end))
        for start, end in zip([begin, *ends], ends, strict=False)
    ]


def _rows_within(rows: Rows | None, start: int, end: int) -> Rows | None:
    """The replicated rows in the part of the dim from `start` to `end`, counted in the part."""
    if rows is None:
        return None
    first, last = max(rows[0], start), min(rows[1], end)
    return (first - start, last - start) if first < last else None


def declared_rows(spec: ShardSpec, tp: int) -> Rows | None:
    """The replicated rows of a declared layout, in the rows of one rank; None when all ranks have different rows."""
    if all(part.replicas == 1 for part in spec.packed):
        return None
    ends = list(accumulate(part.share(tp) for part in spec.packed))
    rows = zip([0, *ends], ends, spec.packed, strict=False)
    shared = [(start, end) for start, end, part in rows if part.replicas > 1]
    return shared[0][0], shared[-1][1]


@view("aten.index_select")
def _along_dim(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """The shard, whose dim is lost along which every rank chooses from its own rows."""
    return shard.keep_dim_if(step.dim_at(1) != shard.dim)


@view("aten.cumsum", "aten.logcumsumexp", "aten.cumprod")
def _running(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A cumulative op starts again on every rank along the sharded dim; that of integers is taken for a local count."""
    if step.dim_at(1) != shard.dim:
        return shard
    if not x.is_floating_point():
        return shard.with_dim(None)
    kind = "product" if step.name == "aten.cumprod" else "scan"
    return replace(shard, pending=step.pending(kind, wording.RUNNING, x=shard))


@view("aten.flip", "aten.roll")
def _moved_around(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A flip or roll of the sharded dim lacks the elements of other ranks."""
    named = step.arg(1 if step.name == "aten.flip" else 2, "dims", ()) or range(x.dim())
    dims = [named] if isinstance(named, int) else named
    moved = {d % x.dim() for d in dims}
    return crossing(step, shard) if shard.dim in moved else shard


def crossing(step: Step, shard: SpmdType) -> SpmdType:
    """The shard after an op along the sharded dim, which lacks elements of the neighbouring ranks."""
    pending = step.pending("halo", wording.CROSSES, x=shard)
    return replace(shard, pending=replace(pending, dim=shard.dim))


@view("aten.constant_pad_nd")
def _padded(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A padded shard stays one; padding on one side of it and cutting on the other moves its elements."""
    assert shard.dim is not None
    place = 2 * (x.dim() - 1 - shard.dim)
    sides = step.arg(1, "pad")[place : place + 2]
    is_shift = len(sides) == 2 and min(sides) < 0 < max(sides)
    return crossing(step, shard) if is_shift else shard


@view("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", "aten.max_pool2d_with_indices")
def _pooled(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A window over the sharded dim needs the neighbours' elements, unless it is one place wide."""
    assert shard.dim is not None
    windows = step.arg(1, "kernel_size")
    place = shard.dim - (x.dim() - len(windows))
    crosses_border = place >= 0 and windows[place] > 1
    return crossing(step, shard) if crosses_border else shard


@view("aten.repeat", "aten.as_strided", "aten.diagonal", "aten.unfold")
def _rearranged(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """The shard, whose dim is lost where a size changes."""
    return shard.keep_dim_if(step.out.shape == x.shape)


def aligned(step: Step) -> Types:
    """Types of all operands, with the sharded dim counted on the result."""
    return Types(broadcast(step, tensor, step.type_of(tensor)) for tensor in step.operands)


def broadcast(step: Step, x: Tensor, type_: SpmdType) -> SpmdType:
    """Type of an operand, with the sharded dim counted on the (first) result."""
    results = step.results
    if type_.dim is None or not results:
        return type_
    shape = results[0].shape
    dim = type_.dim + len(shape) - x.dim()
    has_dim = 0 <= dim < len(shape)
    fits = has_dim and shape[dim] == x.shape[type_.dim]
    return replace(type_, dim=dim).keep_dim_if(fits)


@rule(*PACKS)
def _joined(step: Step) -> Result:
    """Tensors side by side: one type when all agree; constants fit everything, other mixtures are not followed."""
    tensors = step.arg(0, "tensors")
    types = Types(map(step.type_of, tensors))
    if step.name == "aten.stack":
        new = step.arg(1, "dim", 0) % (tensors[0].dim() + 1)
        types = Types(t if t.dim is None or t.dim < new else replace(t, dim=t.dim + 1) for t in types)
    types = types.without("C")
    kinds = types.kinds
    if not types:
        return CONSTANT
    if kinds == {"I", "R"}:
        # They may be split again and each used well, so with both gradients they are not followed.
        decided = types.with_gradient.kinds
        kind: Kind = "R" if "R" in decided else "I"
        return UNKNOWN if decided == {"I", "R"} else SpmdType(kind, types.grad)
    if len(kinds) > 1:
        return SpmdType("V", types.grad) if kinds <= {"V", "I", "R"} else UNKNOWN
    if types.has("V"):
        shard = types.shard
        is_along = step.name == "aten.cat" and step.arg(1, "dim", 0) % tensors[0].dim() == shard.dim
        return replace(shard, grad=types.grad, replicated_rows=_joined_rows(step, shard.dim if is_along else None))
    if types.has("P"):
        return replace(types[0], grad=types.grad) if len(types.ops) == 1 else UNKNOWN
    return replace(types[0], grad=types.grad, origin=types.origin)


def _joined_rows(step: Step, dim: int | None) -> Rows | None:
    """The rows from the first to the last replicated one; `dim` is None where a dim is joined that is not sharded."""
    start = 0
    found: list[int] = []
    for tensor in step.arg(0, "tensors"):
        rows = step.type_of(tensor).replicated_rows
        if rows is not None:
            found += [start + rows[0], start + rows[1]]
        start += 0 if dim is None else tensor.shape[dim]
    return (found[0], found[-1]) if found else None
