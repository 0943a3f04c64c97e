"""Sums, means and extrema over a dim, and the fused norms and softmaxes: what they make of a sharded dim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck.gradients import join
from tpcompile.typecheck.layout import broadcast, without_dims
from tpcompile.typecheck.rules_pointwise import used_as_whole
from tpcompile.typecheck.spmd import SpmdType, varying
from tpcompile.typecheck.step import Result, Step, rule, tensors_in

_LINEAR = ("sum", "mean")
_PARTIAL_OF = {
    "aten.sum": "sum",
    "aten.mean": "mean",
    "aten.amax": "max",
    "aten.max": "max",
    "aten.amin": "min",
    "aten.min": "min",
    "aten.prod": "product",
    "aten.linalg_vector_norm": "norm",
    "aten.norm": "norm",
    "aten.var": "var",
    "aten.std": "var",
    "aten.var_mean": "var",
    "aten.logsumexp": "logsumexp",
}
_DIMS_PLACE = {"aten.linalg_vector_norm": (2, "dim"), "aten.norm": (2, "dim")}


@rule(*_PARTIAL_OF)
def _reduced(step: Step) -> Result:
    """Over the sharded dim the result is partial; over other dims it keeps its type."""
    x = step.args[0]
    if len(step.operands()) > 1:  # aten.max(x, y) is elementwise
        return join(step, [broadcast(step, t, type_) for t, type_ in step.operands()])
    dims = _dims(step, x)
    result = reduced(step, step.type_at(0), x, dims, _PARTIAL_OF[step.name])
    indices = [varying()] if result.kind in ("V", "P") else [SpmdType("C")]
    return [result, *indices * (len(tensors_in(step.out)) - 1)]


def reduced(step: Step, type_: SpmdType, x: Tensor, dims: set[int], op: str) -> SpmdType:
    """Type of `op` over `dims` of `x`."""
    if type_.kind == "P":
        linear = op in _LINEAR and type_.op in _LINEAR
        return type_ if linear or op == type_.op else used_as_whole(step, type_, f"takes the {op} of it")
    if not type_.is_known_shard:
        return replace(type_, is_zero=False)
    if type_.dim in dims:
        return SpmdType("P", type_.grad, op=op, origin=step.origin())
    keeps = any(t.dim() == x.dim() for t in tensors_in(step.out)[:1])
    return type_ if keeps else without_dims(type_, dims)


def _dims(step: Step, x: Tensor) -> set[int]:
    place, name = _DIMS_PLACE.get(step.name, (1, "dim"))
    value = step.arg(place, name)
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return set(range(x.dim()))
    dims = value if isinstance(value, (list, tuple)) else [value]
    return {int(d) % max(1, x.dim()) for d in dims if not isinstance(d, bool)}


@rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax")
def _softmax(step: Step) -> Result:
    """A softmax over the sharded dim normalises over the local shard."""
    x, type_ = step.args[0], step.type_at(0)
    return over_last(step, type_, {step.arg(1, "dim") % x.dim()}, "sums exponentials")


@rule("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm", "aten.layer_norm")
def _normed(step: Step) -> Result:
    """A fused norm sees the local width; a replicated weight on a shard needs copy_to_tp."""
    x = step.args[0]
    dims = set(range(x.dim() - len(step.arg(1, "normalized_shape")), x.dim()))
    result = over_last(step, step.type_at(0), dims, "takes the statistic of a norm")
    if result.kind == "U":
        return [result] * len(tensors_in(step.out))
    joined = join(step, [broadcast(step, t, result if t is x else type_) for t, type_ in step.operands()])
    return [joined, *[SpmdType("U")] * (len(tensors_in(step.out)) - 1)]


def over_last(step: Step, type_: SpmdType, dims: Iterable[int], what: str) -> SpmdType:
    """Type of a normalisation over `dims`; reports a partial input and a sharded dim."""
    if type_.kind == "P":
        return used_as_whole(step, type_, what)
    if not type_.is_known_shard or type_.dim not in set(dims):
        return type_
    return step.flag(
        "local-statistic",
        why=f"{step.name} {what} over dim {type_.dim}, which is sharded: every rank normalises over its own shard only",
        fix="use the distributed form: all-reduce the local sums (dst='R') and divide by the global count, and for a "
        "softmax all-reduce the maximum first",
    )


@rule("aten.sort", "aten.topk", "aten.argmax", "aten.argmin", "aten._local_scalar_dense", "aten.argsort")
def _chosen(step: Step) -> Result:
    """A decision from values: not from partial ones; from a shard it differs per rank."""
    type_ = step.type_at(0)
    if type_.kind == "P" and type_.op in _LINEAR:
        return [used_as_whole(step, type_, "decides by its value")] * max(1, len(tensors_in(step.out)))
    kept = varying(grad=type_.grad) if type_.kind in ("V", "P") else type_
    return [kept] * max(1, len(tensors_in(step.out)))


@rule("aten.cumsum")
def _running(step: Step) -> Result:
    """Linear; along the sharded dim it starts anew on every rank."""
    x, type_ = step.args[0], step.type_at(0)
    return type_.with_dim(None) if type_.is_known_shard and step.arg(1, "dim") % x.dim() == type_.dim else type_


@rule("aten.nll_loss_forward")
def _token_loss(step: Step) -> Result:
    """The loss of a shard of tokens is partial: a sum, or a mean of the local tokens."""
    type_, reduction = step.type_at(0), step.arg(3, "reduction", 1)
    if type_.kind == "P":
        loss = used_as_whole(step, type_, "is a loss")
    elif type_.is_known_shard and type_.dim == 0 and reduction:
        loss = SpmdType("P", type_.grad, op="mean" if reduction == 1 else "sum", origin=step.origin())
    else:
        loss = type_.with_dim(0 if type_.dim == 0 else None) if type_.kind == "V" else type_
    return [loss, SpmdType("U")]
