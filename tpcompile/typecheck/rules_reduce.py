"""Sums, means and extrema over a dim, fused norms and softmaxes: their effect on a sharded dim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck import wording
from tpcompile.typecheck.gradients import join
from tpcompile.typecheck.layout import aligned, without_dims
from tpcompile.typecheck.ops import CHOICES, PARTIAL_OF
from tpcompile.typecheck.rules_pointwise import used_as_whole
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType, Types, varying
from tpcompile.typecheck.step import Result, Step, rule

_LINEAR = ("sum", "mean")
_DIMS_PLACE = {"aten.linalg_vector_norm": 2, "aten.norm": 2, "aten.topk": 2}
"""Position of the argument `dim` in the schema of a reduction; 1 in all others."""
_DIMS_DEFAULT = {"aten.topk": -1, "aten.sort": -1, "aten.argsort": -1}
_LOSS_REDUCTIONS = ("", "mean", "sum")
"""Reduction of a loss, at the integer that stands for it in aten (at::Reduction: none, mean, sum)."""
_MERGEABLE = ("aten._softmax", "aten._safe_softmax", "aten.softmax")
"""The ranks' results of these are merged by their log-sum-exp; those of norms are not."""
_NORM = "takes the statistic of a norm"


@rule(*PARTIAL_OF)
def _reduced(step: Step) -> Result:
    """The result is partial over the sharded dim, and of the operand's type over other dims."""
    if len(step.operands) > 1:  # aten.max(x, y) is elementwise
        return join(step, aligned(step))
    x, type_ = step.args[0], step.type_at(0)
    op, dims = reduction_of(step), reduced_dims(step)
    if type_.kind == "P":
        # A local reduction and the one over the ranks can be swapped when both are linear, or the same.
        is_linear = op in _LINEAR and type_.op in _LINEAR
        if not is_linear and op != type_.op:
            type_ = used_as_whole(step, type_, f"takes the {op} of it")
    elif not type_.is_known_shard:
        type_ = replace(type_, is_zero=False)
    elif type_.dim in dims:
        type_ = SpmdType("P", type_.grad, op=op, origin=step.origin())
    elif step.results[0].dim() != x.dim():
        type_ = without_dims(type_, dims)
    differs_per_rank = type_.kind in ("V", "P")
    return step.first_result(type_, others=varying() if differs_per_rank else CONSTANT)


def reduction_of(step: Step) -> str:
    """What the op reduces with, empty for other ops; a norm of an order other than 2 is named by it: norm1, norminf."""
    reduction = PARTIAL_OF.get(step.name, "")
    if reduction != "norm":
        return reduction
    order = step.arg(1, "p" if step.name == "aten.norm" else "ord", 2)
    return "norm" if order in (None, 2) else f"norm{order:g}"


def reduced_dims(step: Step) -> set[int]:
    """The dims of the first operand that the op reduces, or chooses along, counted from the front."""
    num_dims = step.args[0].dim()
    dims = step.arg(_DIMS_PLACE.get(step.name, 1), "dim", _DIMS_DEFAULT.get(step.name))
    if dims in (None, [], ()):
        return set(range(num_dims))
    if not isinstance(dims, (list, tuple)):
        dims = [dims]
    return {d % max(1, num_dims) for d in dims}


def normalised(step: Step, type_: SpmdType, dims: Iterable[int], what: str) -> SpmdType:
    """Type of a normalisation over `dims`, that of its input; reports a partial input and a sharded dim."""
    if type_.kind == "P":
        return used_as_whole(step, type_, what)
    if not type_.is_known_shard or type_.dim not in set(dims):
        return type_
    if step.name not in _MERGEABLE:
        return step.flag(wording.LOCAL_NORM, x=type_, what=what)
    return replace(type_, pending=step.pending("shift", wording.LOCAL_NORM, x=type_, what=what))


@rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax")
def _softmax(step: Step) -> Result:
    """A softmax over the sharded dim normalises over the local shard."""
    return normalised(step, step.type_at(0), {step.dim_at(1)}, "sums exponentials")


@rule(
    "aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm", "aten.layer_norm", "aten._weight_norm_interface"
)  # fmt: skip
def _normed(step: Step) -> Result:
    """A fused norm sees the local width; a replicated weight on a shard needs copy_to_tp.

    A weight norm has v [out, in...], g [out, 1...], dim: every slice along `dim` is divided by its norm.
    """
    num_dims = step.args[0].dim()
    if step.name == "aten._weight_norm_interface":
        dims = set(range(num_dims)) - {step.dim_at(2)}
    else:
        width = len(step.arg(1, "normalized_shape"))
        dims = set(range(num_dims - width, num_dims))
    result = normalised(step, step.type_at(0), dims, _NORM)
    if result.kind == "U":
        return UNKNOWN
    return step.first_result(join(step, aligned(step)))


@rule(
    "aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm", "aten._batch_norm_with_update",
    "aten.native_group_norm",
)  # fmt: skip
def _normed_channels(step: Step) -> Result:
    """x [N, C, S...], weight [C] or None, bias [C] or None: a norm over places, and in a batch norm over the batch.

    A group norm is over channels, too: whole groups are on one rank, as far as types say.
    """
    dims = set(range(2, step.args[0].dim()))
    if step.name != "aten.native_group_norm":
        is_training = step.arg(5, "training", True)
        dims = {0, *dims} if is_training else set()
    x = normalised(step, step.type_at(0), dims, _NORM)
    if x.kind == "U":
        return UNKNOWN
    weights = [step.type_of(tensor) for tensor in step.args[1:3] if isinstance(tensor, Tensor)]
    on_channels = [replace(type_, dim=1) if type_.is_known_shard else type_ for type_ in weights]
    statistics = varying() if x.kind == "V" else CONSTANT
    return step.first_result(join(step, Types([x, *on_channels])), others=statistics)


@rule(*CHOICES, "aten._local_scalar_dense")
def _chosen(step: Step) -> Result:
    """A decision by value: wrong for a partial sum, different per rank for a shard."""
    type_ = step.type_at(0)
    if type_.is_partial_of(*_LINEAR):
        type_ = used_as_whole(step, type_, "decides by its value")
    elif type_.kind in ("V", "P"):
        type_ = SpmdType("V", type_.grad, origin=step.origin())
    return type_


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
