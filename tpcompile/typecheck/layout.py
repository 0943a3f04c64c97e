"""Sharded dim of an input -> sharded dim of a view, slice, reshape or concatenation of it.

Only a V with a known dim changes type here: a partial or replicated tensor has the same type in every view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from tpcompile.typecheck.replicated import joined_rows, parts_of, reshaped_rows
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, Kind, Pending, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, rule

View = Callable[[Step, SpmdType, Tensor], Result]


def view(*names: str) -> Callable[[View], View]:
    """Register a function that moves a known shard; every result gets the same type unless it returns one for each."""

    def register(function: View) -> View:
        def judge(step: Step) -> Result:
            x, shard = step.args[0], step.type_at(0)
            moved = function(step, shard, x) if shard.is_known_shard else shard
            return step.all_results(moved) if isinstance(moved, SpmdType) else moved

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

    @property
    def size(self) -> int:
        """Size of the dim."""
        return self.after // self.before

    def splits_at(self, start: int) -> bool:
        """True when the dim has a part of whole size at `start`."""
        is_inside = self.before <= start < self.after
        return is_inside and start % self.before == 0 and self.after % start == 0


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
        return _reshaped_single(shard, start, new)
    if _ones_at(start, new) > _ones_at(start, old[: shard.dim]):
        return shard.with_dim(None)
    for span in _spans(new):
        if span.splits_at(start):
            right = max(1, span.after // (start * local))
            return shard.with_dim(span.dim, start // span.before, right)
    return shard.with_dim(None)


def _reshaped_single(shard: SpmdType, start: int, new: Sequence[int]) -> SpmdType:
    """A shard of local size 1 is the only dim of size 1 at its place, or was merged into the dim that begins there."""
    spans = [span for span in _spans(new) if span.before == start]
    is_ambiguous = _ones_at(start, new) > 1
    if is_ambiguous or not spans:
        return shard.with_dim(None)
    first = spans[0]
    return shard.with_dim(first.dim, 1, first.size)


def _spans(shape: Sequence[int]) -> list[_Span]:
    totals = [math.prod(shape[:dim]) for dim in range(len(shape) + 1)]
    return [_Span(dim, totals[dim], totals[dim + 1]) for dim in range(len(shape))]


def _ones_at(start: int, shape: Sequence[int]) -> int:
    """Number of dims of size 1 that begin at `start`."""
    return sum(span.before == span.after == start for span in _spans(shape))


@view("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unflatten", "aten.flatten")
def _view(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """The same elements in a different shape."""
    if x.dtype != step.out.dtype:
        return shard.with_dim(None)
    found = reshaped(shard, x.shape, step.out.shape)
    if shard.dim is None or found.dim is None:
        return found
    return reshaped_rows(found, x.shape[shard.dim], step.out.shape[found.dim])


@view("aten.permute")
def _permuted(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims in a new order."""
    order = [d % x.dim() for d in step.arg(1, "dims")]
    return replace(shard, dim=order.index(shard.dim))


@view("aten.movedim")
def _moved(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims in a new order, which is not followed."""
    return shard.with_dim(None)


@view("aten.transpose")
def _transposed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Two dims swapped."""
    return _swapped(shard, step.arg(1, "dim0") % x.dim(), step.arg(2, "dim1") % x.dim())


@view("aten.t")
def _matrix_transposed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Rows and columns swapped; a vector stays as it is."""
    return _swapped(shard, 0, x.dim() - 1)


def _swapped(shard: SpmdType, dim0: int, dim1: int) -> SpmdType:
    assert shard.dim is not None
    moved = {dim0: dim1, dim1: dim0}
    return replace(shard, dim=moved.get(shard.dim, shard.dim))


@view("aten.unsqueeze")
def _unsqueezed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """One more dim, of size 1."""
    return _behind_new_dim(shard, step.arg(1, "dim") % (x.dim() + 1))


def _behind_new_dim(type_: SpmdType, new: int) -> SpmdType:
    """The type after a dim was inserted at `new`."""
    if type_.dim is None or type_.dim < new:
        return type_
    return replace(type_, dim=type_.dim + 1)


@view("aten.squeeze")
def _squeezed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims of size 1 removed: all of them, or those that are named."""
    dims = step.arg(1, "dim", range(x.dim()))
    if isinstance(dims, int):
        dims = [dims]
    removed = {d % x.dim() for d in dims if x.shape[d] == 1}
    return without_dims(shard, removed)


@view("aten.select", "aten.unbind")
def _selected(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """One dim removed; a slice of the sharded dim differs per rank, and is sharded on no dim."""
    return without_dims(shard, {step.arg(1, "dim", 0) % x.dim()})


@view("aten.expand")
def _expanded(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """New dims in front."""
    assert shard.dim is not None
    return replace(shard, dim=shard.dim + step.out.dim() - x.dim())


@view("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow", "aten.unsafe_split")
def _sliced(step: Step, shard: SpmdType, x: Tensor) -> Result:
    """A part of the local shard is still sharded on that dim; of a merged dim, only one index of what is in front."""
    place = {"aten.slice": 1, "aten.narrow": 1}.get(step.name, 2)
    dim = step.arg(place, "dim", 0) % x.dim()
    if dim != shard.dim:
        return shard
    sizes = {part.shape[dim] for part in step.results}
    is_one_index = sizes == {x.shape[dim] // shard.left}
    is_shard = shard.left == 1 or is_one_index
    return parts_of(step, shard.with_dim(dim if is_shard else None), x, dim)


@view("aten.index_select")
def _along_dim(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Along the sharded dim every rank chooses from its own shard; other dims stay."""
    is_along_shard = step.arg(1, "dim") % x.dim() == shard.dim
    return shard.keep_dim_if(not is_along_shard)


@view("aten.cumsum", "aten.logcumsumexp", "aten.cumprod")
def _running(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Along the sharded dim every rank starts again; counts of local values are intended."""
    if step.arg(1, "dim") % x.dim() != shard.dim:
        return shard
    if not x.is_floating_point():
        return shard.with_dim(None)
    pending = step.pending(
        "product" if step.name == "aten.cumprod" else "scan",
        "crosses-shards",
        why=f"{step.name} runs along dim {shard.dim}, which is sharded: it starts again on every rank",
        fix="add what the ranks before have in total: all_gather the totals, sum those of lower ranks; or gather first",
    )
    return replace(shard, pending=pending)


@view("aten.flip", "aten.roll")
def _moved_around(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Along the sharded dim, elements should move to and from other ranks."""
    place, name = (1, "dims") if step.name == "aten.flip" else (2, "dims")
    dims = step.arg(place, name, ()) or range(x.dim())
    moved = {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    return replace(shard, pending=crosses(step, shard)) if shard.dim in moved else shard


def crosses(step: Step, shard: SpmdType) -> Pending:
    """What an op along the sharded dim lacks: elements of the neighbouring ranks."""
    return step.pending(
        "halo",
        "crosses-shards",
        why=f"{step.name} moves or mixes elements along dim {shard.dim}, which is sharded: those of other ranks are "
        "missing",
        fix="exchange the elements at the border with the neighbouring ranks, or all_gather along the dim first",
        dim=shard.dim,
    )


@view("aten.constant_pad_nd")
def _padded(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A padded shard stays one; padding on one side of it and cutting on the other moves its elements."""
    assert shard.dim is not None
    pad = step.arg(1, "pad")
    place = 2 * (x.dim() - 1 - shard.dim)
    sides = pad[place : place + 2]
    is_shift = len(sides) == 2 and min(sides) < 0 < max(sides)
    return replace(shard, pending=crosses(step, shard)) if is_shift else shard


@view("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", "aten.max_pool2d_with_indices")
def _pooled(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A window over the sharded dim needs the neighbours' elements, unless it is one place wide."""
    assert shard.dim is not None
    windows = step.arg(1, "kernel_size")
    place = shard.dim - (x.dim() - len(windows))
    crosses_border = place >= 0 and windows[place] > 1
    return replace(shard, pending=crosses(step, shard)) if crosses_border else shard


@view("aten.repeat", "aten.as_strided", "aten.diagonal", "aten.unfold")
def _rearranged(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Followed while no size changes."""
    return shard.keep_dim_if(step.out.shape == x.shape)


def without_dims(shard: SpmdType, dims: set[int]) -> SpmdType:
    """The shard after these dims were removed."""
    if shard.dim is None or shard.dim in dims:
        return shard.with_dim(None)
    num_removed_in_front = sum(d < shard.dim for d in dims)
    return replace(shard, dim=shard.dim - num_removed_in_front)


def broadcast(step: Step, x: Tensor, type_: SpmdType) -> SpmdType:
    """Type of an operand, with the sharded dim counted on the (first) result."""
    if type_.dim is None:
        return type_
    results = step.results
    if not results:
        return type_
    shape = results[0].shape
    dim = type_.dim + len(shape) - x.dim()
    has_dim = 0 <= dim < len(shape)
    fits = has_dim and shape[dim] == x.shape[type_.dim]
    return replace(type_, dim=dim).keep_dim_if(fits)


@rule("aten.cat", "aten.stack")
def _joined(step: Step) -> Result:
    """Tensors side by side: one type when all agree; constants fit everything, other mixtures are not followed."""
    tensors = step.arg(0, "tensors")
    types = Types(step.type_of(t) for t in tensors)
    if step.name == "aten.stack":
        new = step.arg(1, "dim", 0) % (tensors[0].dim() + 1)
        types = Types(_behind_new_dim(t, new) for t in types)
    types = types.without("C")
    if not types:
        return CONSTANT
    if len(types.kinds) > 1:
        return _mixed(types)
    if types.has("V"):
        rows = joined_rows(tensors, [step.type_of(t) for t in tensors], step.arg(1, "dim", 0))
        return replace(types.shard, grad=types.grad, replicated_rows=rows)
    if types.has("P"):
        return replace(types[0], grad=types.grad) if len(types.ops) == 1 else UNKNOWN
    return replace(types[0], grad=types.grad, origin=types.origin)


def _mixed(types: Types) -> SpmdType:
    """Type of joined tensors of more than one kind."""
    if types.kinds == {"I", "R"}:
        # They may be split again and each used well, so with both gradients they are not followed.
        decided = types.with_gradient.kinds
        kind: Kind = "R" if "R" in decided else "I"
        return UNKNOWN if decided == {"I", "R"} else SpmdType(kind, types.grad)
    is_varying = types.kinds <= {"V", "I", "R"}
    return SpmdType("V", types.grad) if is_varying else UNKNOWN
