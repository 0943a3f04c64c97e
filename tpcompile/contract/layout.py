"""Sharded dim of an input -> sharded dim of a view, slice, reshape or concatenation of it.

Only a V with a known dim changes type here: what is partial or replicated stays so in every view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType
from tpcompile.typecheck.step import Result, Step, rule, tensors_in

View = Callable[[Step, SpmdType, Tensor], SpmdType]


def view(*names: str) -> Callable[[View], View]:
    """Register a function that moves a known shard; every result of the op gets the same type."""

    def register(function: View) -> View:
        def judge(step: Step) -> Result:
            x, shard = step.args[0], step.type_at(0)
            shard = function(step, shard, x) if shard.is_known_shard else shard
            return [shard] * max(1, len(tensors_in(step.out)))

        judge.__doc__ = function.__doc__
        rule(*names)(judge)
        return function

    return register


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
    for dim, before, after in _spans(new):
        if before <= start < after and start % before == 0 and after % start == 0:
            return shard.with_dim(dim, start // before, max(1, after // (start * local)))
    return shard.with_dim(None)


def _reshaped_single(shard: SpmdType, start: int, new: Sequence[int]) -> SpmdType:
    """A local size of 1 is the only dim of size 1 at its place, or was merged into the dim that begins there."""
    ones = [dim for dim, before, after in _spans(new) if before == after == start]
    if len(ones) > 1:
        return shard.with_dim(None)
    merged = [(dim, after // start) for dim, before, after in _spans(new) if before == start < after]
    dim, right = (ones[0], 1) if ones else merged[0] if merged else (None, 1)
    return shard.with_dim(dim, 1, right)


def _spans(shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """(dim, number of elements to choose from before it, the same after it) of every dim."""
    totals = [math.prod(shape[:dim]) for dim in range(len(shape) + 1)]
    return [(dim, totals[dim], totals[dim + 1]) for dim in range(len(shape))]


def _ones_at(start: int, shape: Sequence[int]) -> int:
    return sum(before == after == start for _, before, after in _spans(shape))


@view("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unflatten", "aten.flatten")
def _view(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Other dims, same numbers."""
    return reshaped(shard, x.shape, step.out.shape) if x.dtype == step.out.dtype else shard.with_dim(None)


@view("aten.t", "aten.transpose", "aten.permute", "aten.movedim")
def _permuted(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims in another order."""
    if step.name == "aten.permute":
        order = [d % x.dim() for d in step.arg(1, "dims")]
        return replace(shard, dim=order.index(shard.dim))
    if step.name == "aten.movedim":
        return shard.with_dim(None)
    one, other = (0, 1) if step.name == "aten.t" else (step.arg(1, "dim0") % x.dim(), step.arg(2, "dim1") % x.dim())
    return shard if x.dim() < 2 else replace(shard, dim={one: other, other: one}.get(shard.dim, shard.dim))


@view("aten.unsqueeze")
def _unsqueezed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """One more dim."""
    assert shard.dim is not None
    new = step.arg(1, "dim") % (x.dim() + 1)
    return replace(shard, dim=shard.dim + (new <= shard.dim))


@view("aten.squeeze")
def _squeezed(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims of size 1 less."""
    dims = step.arg(1, "dim", list(range(x.dim())))
    chosen = {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    return without_dims(shard, {d for d in chosen if x.shape[d] == 1})


@view("aten.select", "aten.unbind")
def _selected(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """One dim less; a choice from the sharded dim differs per rank, but on no dim."""
    return without_dims(shard, {step.arg(1, "dim", 0) % x.dim()})


@view("aten.expand")
def _expanded(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Dims in front."""
    assert shard.dim is not None
    return replace(shard, dim=shard.dim + step.out.dim() - x.dim())


@view("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow", "aten.unsafe_split")
def _sliced(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """A part of the local shard is still spread over that dim, if it is one of what was merged in front of it."""
    place = {"aten.slice": 1, "aten.narrow": 1}.get(step.name, 2)
    if step.arg(place, "dim", 0) % x.dim() != shard.dim:
        return shard
    sizes = {part.shape[shard.dim] for part in tensors_in(step.out)}
    is_one = shard.left == 1 or sizes == {x.shape[shard.dim] // shard.left}
    return shard.with_dim(shard.dim if is_one else None)


@view("aten.index_select")
def _index_selected(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Rows by index: the other dims stay."""
    return _unless(step.arg(1, "dim") % x.dim() == shard.dim, shard)


@view(
    "aten.constant_pad_nd", "aten.flip", "aten.roll", "aten.repeat", "aten.as_strided", "aten.diagonal", "aten.unfold"
)
def _rearranged(step: Step, shard: SpmdType, x: Tensor) -> SpmdType:
    """Followed while no size changes."""
    keeps = step.name in ("aten.flip", "aten.roll") or tuple(step.out.shape) == tuple(x.shape)
    return _unless(not keeps, shard)


def _unless(lost: bool, shard: SpmdType) -> SpmdType:
    return shard.with_dim(None) if lost else shard


def without_dims(shard: SpmdType, dims: set[int]) -> SpmdType:
    """The shard after these dims went away."""
    if shard.dim is None or shard.dim in dims:
        return shard.with_dim(None)
    return replace(shard, dim=shard.dim - sum(d < shard.dim for d in dims))


def broadcast(step: Step, x: Tensor, type_: SpmdType) -> SpmdType:
    """Type of an operand on the dims of the (first) result."""
    outs = tensors_in(step.out)
    if type_.dim is None or not outs:
        return type_
    dim = type_.dim + outs[0].dim() - x.dim()
    fits = 0 <= dim < outs[0].dim() and outs[0].shape[dim] == x.shape[type_.dim]
    return replace(type_, dim=dim) if fits else type_.with_dim(None)


@rule("aten.cat", "aten.stack")
def _joined(step: Step) -> Result:
    """Tensors side by side: one type when all agree; constants fit everything, other mixtures are not followed."""
    tensors = step.arg(0, "tensors")
    types = [step.type_of(t) for t in tensors]
    if step.name == "aten.stack":
        new = step.arg(1, "dim", 0) % (tensors[0].dim() + 1)
        types = [t if t.dim is None else replace(t, dim=t.dim + (new <= t.dim)) for t in types]
    solid = [t for t in types if t.kind != "C"]
    if not solid:
        return CONSTANT
    if len({(t.kind, t.op) for t in solid}) > 1:
        has_shard = all(t.kind in ("V", "I", "R") for t in solid) and any(t.kind == "V" for t in solid)
        return SpmdType("V", any(t.grad for t in solid)) if has_shard else _mixed(solid)
    first = replace(solid[0], grad=any(t.grad for t in solid))
    if first.kind == "V" and len({(t.dim, t.left) for t in solid}) > 1:
        return first.with_dim(None)
    same_origin = first.kind == "P" or len({t.origin for t in solid}) == 1
    return first if same_origin else replace(first, origin=None)


def _mixed(types: Sequence[SpmdType]) -> SpmdType:
    """Packed I and R may be taken apart again and used well, so they are not judged here."""
    if not all(t.is_whole for t in types) or {"I", "R"} <= {t.kind for t in types if t.grad}:
        return UNKNOWN
    return SpmdType("R" if any(t.wants_summed_gradient for t in types) else "I", any(t.grad for t in types))
