"""Sums, means and extrema over a dim, fused norms and softmaxes: their effect on a sharded dim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck.gradients import join
from tpcompile.typecheck.layout import without_dims
from tpcompile.typecheck.rules_pointwise import aligned, used_as_whole
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType, Types, varying
from tpcompile.typecheck.step import Result, Step, rule

_LINEAR = ("sum", "mean")
PARTIAL_OF = {
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
_NORMS = ("aten.linalg_vector_norm", "aten.norm")
_DIMS_PLACE = {"aten.linalg_vector_norm": 2, "aten.norm": 2, "aten.topk": 2}
_DIMS_DEFAULT = {"aten.topk": -1, "aten.sort": -1, "aten.argsort": -1}
CHOICES = ("aten.sort", "aten.topk", "aten.argmax", "aten.argmin", "aten.argsort")
"""Ops that choose, or order, by value along a dim."""
_LOSS_REDUCTIONS = ("", "mean", "sum")
"""By the integer that stands for a loss's `reduction` in aten."""


@rule(*PARTIAL_OF)
def _reduced(step: Step) -> Result:
    """Over the sharded dim the result is partial; over other dims it keeps its type."""
    x = step.args[0]
    if len(step.operands()) > 1:  # aten.max(x, y) is elementwise
        return join(step, aligned(step))
    dims = reduced_dims(step, x)
    result = reduced(step, step.type_at(0), x, dims, reduction_of(step))
    differs_per_rank = result.kind in ("V", "P")
    return step.first_result(result, others=varying() if differs_per_rank else CONSTANT)


def reduction_of(step: Step) -> str:
    """What the op reduces with, empty for other ops; a norm of an order other than 2 is named by it: norm1, norminf."""
    if step.name not in _NORMS:
        return PARTIAL_OF.get(step.name, "")
    order = step.arg(1, "ord", 2) if step.name == _NORMS[0] else step.arg(1, "p", 2)
    return "norm" if order in (None, 2) else f"norm{order:g}"


def reduced(step: Step, type_: SpmdType, x: Tensor, dims: set[int], op: str) -> SpmdType:
    """Type of `op` over `dims` of `x`."""
    if type_.kind == "P":
        return _reduced_partial(step, type_, op)
    if not type_.is_known_shard:
        return replace(type_, is_zero=False)
    if type_.dim in dims:
        return SpmdType("P", type_.grad, op=op, origin=step.origin())
    keeps_dims = step.results[0].dim() == x.dim()
    return type_ if keeps_dims else without_dims(type_, dims)


def _reduced_partial(step: Step, partial: SpmdType, op: str) -> SpmdType:
    """A local reduction and the one over the ranks can be swapped when both are linear, or the same."""
    is_linear = op in _LINEAR and partial.op in _LINEAR
    if is_linear or op == partial.op:
        return partial
    return used_as_whole(step, partial, f"takes the {op} of it")


def reduced_dims(step: Step, x: Tensor) -> set[int]:
    """The dims that the op reduces, or chooses along, counted from the front."""
    dims = step.arg(_DIMS_PLACE.get(step.name, 1), "dim", _DIMS_DEFAULT.get(step.name))
    if dims in (None, [], ()):
        return set(range(x.dim()))
    if not isinstance(dims, (list, tuple)):
        dims = [dims]
    return {d % max(1, x.dim()) for d in dims}


@rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax")
def _softmax(step: Step) -> Result:
    """A softmax over the sharded dim normalises over the local shard."""
    x, type_ = step.args[0], step.type_at(0)
    return over_last(step, type_, {step.arg(1, "dim") % x.dim()}, "sums exponentials")


@rule("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm", "aten.layer_norm")
def _normed(step: Step) -> Result:
    """A fused norm sees the local width; a replicated weight on a shard needs copy_to_tp."""
    x = step.args[0]
    num_dims = len(step.arg(1, "normalized_shape"))
    dims = range(x.dim() - num_dims, x.dim())
    result = over_last(step, step.type_at(0), dims, "takes the statistic of a norm")
    if result.kind == "U":
        return step.all_results(UNKNOWN)
    return step.first_result(join(step, aligned(step)))


@rule("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm", "aten._batch_norm_with_update")
def _batch_normed(step: Step) -> Result:
    """In training the statistics are over all dims but the channels, dim 1."""
    x, training = step.args[0], step.arg(5, "training", True)
    return _normed_channels(step, {0, *range(2, x.dim())} if training else set())


@rule("aten.native_group_norm")
def _group_normed(step: Step) -> Result:
    """The statistics are over the places, and over channels: whole groups are on one rank, as far as types say."""
    return _normed_channels(step, set(range(2, step.args[0].dim())))


def _normed_channels(step: Step, dims: set[int]) -> Result:
    """x [N, C, S...], weight [C] or None, bias [C] or None: a norm over `dims` of x."""
    x = over_last(step, step.type_at(0), dims, "takes the statistic of a norm")
    if x.kind == "U":
        return step.all_results(UNKNOWN)
    weights = [step.type_of(tensor) for tensor in step.args[1:3] if isinstance(tensor, Tensor)]
    on_channels = [replace(type_, dim=1) if type_.is_known_shard else type_ for type_ in weights]
    statistics = varying() if x.kind == "V" else CONSTANT
    return step.first_result(join(step, Types([x, *on_channels])), others=statistics)


@rule("aten._weight_norm_interface")
def _weight_normed(step: Step) -> Result:
    """v [out, in...], g [out, 1...], dim: every slice along `dim` is divided by its norm, taken over the other dims."""
    v = step.args[0]
    kept = step.arg(2, "dim", 0) % v.dim()
    result = over_last(step, step.type_at(0), set(range(v.dim())) - {kept}, "takes the norm")
    if result.kind == "U":
        return step.all_results(UNKNOWN)
    return step.first_result(join(step, aligned(step)))


def over_last(step: Step, type_: SpmdType, dims: Iterable[int], what: str) -> SpmdType:
    """Type of a normalisation over `dims`, that of its input; reports a partial input and a sharded dim."""
    if type_.kind == "P":
        return used_as_whole(step, type_, what)
    if not type_.is_known_shard or type_.dim not in set(dims):
        return type_
    normalised = step.pending(
        "shift",
        "local-statistic",
        why=f"{step.name} {what} over dim {type_.dim}, which is sharded: every rank normalises over its own shard only",
        fix="use the distributed form: all-reduce the local sums (dst='R') and divide by the global count, and for a "
        "softmax all-reduce the maximum first",
    )
    if step.name in MERGEABLE:
        return replace(type_, pending=normalised)
    return step.flag(normalised.rule, why=normalised.why, fix=normalised.fix)


MERGEABLE = ("aten._softmax", "aten._safe_softmax", "aten.softmax")
"""The ranks' results of these are merged by their log-sum-exp; those of norms are not."""


@rule(*CHOICES, "aten._local_scalar_dense")
def _chosen(step: Step) -> Result:
    """A decision by value: wrong for a partial sum, different per rank for a shard."""
    type_ = step.type_at(0)
    if type_.kind == "P" and type_.op in _LINEAR:
        type_ = used_as_whole(step, type_, "decides by its value")
    elif type_.kind in ("V", "P"):
        type_ = replace(varying(grad=type_.grad), origin=step.origin())
    return step.all_results(type_)


@rule("aten.nll_loss_forward")
def _token_loss(step: Step) -> Result:
    """The loss of a shard of tokens is partial: a sum, or a mean of the local tokens."""
    type_ = step.type_at(0)
    op = _LOSS_REDUCTIONS[step.arg(3, "reduction", 1)]
    is_token_shard = type_.dim == 0
    if type_.kind == "P":
        loss = used_as_whole(step, type_, "is a loss")
    elif is_token_shard and op:
        loss = SpmdType("P", type_.grad, op=op, origin=step.origin())
    else:
        loss = type_.keep_dim_if(is_token_shard)
    return step.first_result(loss)
