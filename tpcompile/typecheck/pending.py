"""A value that is right on its rank only, and the op that reads it -> carried on, completed, or a violation.

kind     made by                                  completed by
scan     a running sum along the sharded dim      adding what the ranks before it have
product  exp of a scan                            multiplying by it
halo     roll, flip, convolution along the shard  writing the elements of the neighbour, or cutting the border off
shift    minus the local maximum; local softmax   multiplying by the rank's own weight, as a log-sum-exp merge does
factor   a sum of local means, a mean of sums     dividing, or multiplying, by the number of ranks
gather   blocks that do not lie side by side      taking them apart again (not followed further)
blocks   such blocks, taken apart                 joining along the sharded dim; adding up partial ones

Each use that neither carries nor completes it is reported at the op that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from tpcompile.typecheck.spmd import UNKNOWN, Pending, SpmdType, Types
from tpcompile.typecheck.step import Result, Step

Judge = Callable[[Step], Result]
_SAME_VALUE = {
    "aten.alias", "aten.detach", "aten.clone", "aten._to_copy", "aten.contiguous", "aten.lift_fresh", "aten.view_as",
    "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
}  # fmt: skip
_VIEWS = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unsqueeze", "aten.squeeze",
    "aten.expand", "aten.transpose", "aten.t", "aten.permute", "aten.movedim", "aten.select", "aten.unbind",
    "aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.flatten", "aten.unflatten",
}  # fmt: skip
_APART = {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.select"}
_CUTS = {"aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.select"}
_SUMS = {"aten.add", "aten.sub", "aten.rsub"}
_SCALES = {"aten.mul", "aten.div", "aten.true_divide"}
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.mv"}
_PROBES = {"aten.isnan", "aten.isinf", "aten.isfinite", "aten.eq", "aten.ne"}

CARRIED, COMPLETED, LOST, WRONG = "carried", "completed", "lost", "wrong"


def pending_of(step: Step) -> Pending | None:
    """The first pending value that the op reads."""
    found = [type_.pending for type_ in step.types if type_.pending is not None]
    return found[0] if found else None


def judge_pending(step: Step, pending: Pending, judge: Judge) -> Result:
    """Types of the results of an op that reads a pending value; `judge` gives them for the value as it stands."""
    outcome = WRONG
    if step.name in _SAME_VALUE:
        outcome = CARRIED
    elif step.name in _PROBES:
        outcome = LOST
    elif step.name.startswith(("aten.", "_c10d_functional.")) or step.name in _OF_CALLS:
        outcome = OUTCOMES[pending.kind](step, pending)
    else:
        outcome = LOST  # a custom op
    if outcome == WRONG:
        return step.all_results(step.flag_pending(pending))
    if outcome == LOST:
        return step.all_results(UNKNOWN)
    plain = replace(step, type_of=lambda tensor: replace(step.type_of(tensor), pending=None))
    result = judge(plain)
    return result if outcome == COMPLETED else _carried(step, result, pending)


_OF_CALLS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "copy_to_tp", "scatter_single")
"""Wrappers that take the value for one of the whole tensor; any other call may bring it where it belongs."""


def _carried(step: Step, result: Result, pending: Pending) -> Result:
    if pending.kind == "gather" and step.name in _APART:
        pending = replace(pending, kind="blocks")
    elif pending.kind == "gather" and step.name in _VIEWS and step.out.shape != step.args[0].shape:
        pending = replace(pending, dim=None)
    if pending.kind == "scan" and step.name == "aten.exp":
        pending = replace(pending, kind="product")
    results = [result] if isinstance(result, SpmdType) else list(result)
    kept = [type_ if type_.kind in ("U", "C") else replace(type_, pending=pending) for type_ in results]
    return kept[0] if isinstance(result, SpmdType) else kept


def _others(step: Step) -> Types:
    """Types of the operands that are not pending."""
    return Types(type_ for type_ in step.types if type_.pending is None)


def _has_own_value(step: Step) -> bool:
    """Whether an operand differs per rank on no known dim, as what a rank knows of itself or of the ranks before."""
    return any((t.kind == "V" and t.dim is None) or t.kind == "U" or _is_gathered(t) for t in _others(step))


def _is_gathered(type_: SpmdType) -> bool:
    return type_.kind == "R" and type_.origin is not None and "gather" in type_.origin.what


def _scan(step: Step, pending: Pending) -> str:
    if step.name in _SUMS and _has_own_value(step):
        return COMPLETED
    scales_by_whole = step.name in _SCALES and all(t.is_whole for t in _others(step))
    if step.name in _VIEWS or step.name in ("aten.neg", "aten.exp") or scales_by_whole:
        return CARRIED
    return WRONG


def _product(step: Step, pending: Pending) -> str:
    if step.name == "aten.mul" and _has_own_value(step):
        return COMPLETED
    return CARRIED if step.name in _VIEWS else WRONG


def _halo(step: Step, pending: Pending) -> str:
    writes_border = step.name in ("aten.copy", "aten.where", "aten.index_put", "aten.slice_scatter")
    if writes_border:
        return COMPLETED
    is_cut = step.name in _CUTS and all(part.shape != step.args[0].shape for part in step.results)
    if is_cut and pending.dim is not None:
        return COMPLETED
    return CARRIED if step.name in _VIEWS else WRONG


def _shift(step: Step, pending: Pending) -> str:
    kinds = _others(step).kinds
    if step.name in ("aten.mul", "aten.div") and _has_own_value(step):
        return COMPLETED
    if step.name in ("aten.log", "aten.reciprocal") or (step.name in _SUMS | _SCALES and "P" in kinds | _kinds(step)):
        return LOST
    is_linear = step.name in _VIEWS | _PRODUCTS | _SCALES or step.name in (
        "aten.sum",
        "aten.exp",
        "aten.native_dropout",
    )
    return CARRIED if is_linear else WRONG


def _kinds(step: Step) -> set[Any]:
    """Kinds of the operands where more than one is pending."""
    pending = [type_ for type_ in step.types if type_.pending is not None]
    return {type_.kind for type_ in pending} if len(pending) > 1 else set()


def _factor(step: Step, pending: Pending) -> str:
    """`dim` is 1 for a value that is too large by the number of ranks, -1 for one that is too small."""
    number = _number(step)
    if number is None:
        return CARRIED if step.name in _VIEWS or step.name == "aten.neg" else WRONG
    scale = number if step.name == "aten.mul" else 1 / number
    wanted = 1 / step.world if pending.dim == 1 else step.world
    return COMPLETED if math.isclose(scale, wanted, rel_tol=1e-6) else CARRIED


def _number(step: Step) -> float | None:
    """The number that the op multiplies or divides by, other than zero; a tensor of one element has one as well."""
    if step.name not in _SCALES:
        return None
    value = step.args[1]
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not value.is_meta and step.type_at(1).kind == "C"
        value = value.item() if is_number else None
    is_number = isinstance(value, (int, float)) and value != 0
    return float(value) if is_number else None


def _gather(step: Step, pending: Pending) -> str:
    """A view with more dims takes the blocks apart; a sum may be over them, a mask may choose among them."""
    if step.name in _APART:
        return CARRIED
    is_sum = step.name in ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.logsumexp")
    is_of_parts = pending.rule == "partial-used-as-whole"
    if (is_sum and is_of_parts) or _has_own_value(step):
        return LOST
    if step.name not in _VIEWS - _CUTS:
        return WRONG
    return LOST if step.out.dim() > step.args[0].dim() else CARRIED


def _blocks(step: Step, pending: Pending) -> str:
    if step.name == "aten.cat":
        joined_at = step.arg(1, "dim", 0) % step.args[0][0].dim()
        if pending.dim is None and pending.rule == "wrong-gather-dim":
            return LOST  # which dim is sharded was not followed
        return COMPLETED if joined_at == pending.dim else WRONG
    return LOST


OUTCOMES: dict[str, Callable[[Step, Pending], str]] = {
    "scan": _scan,
    "product": _product,
    "halo": _halo,
    "shift": _shift,
    "factor": _factor,
    "gather": _gather,
    "blocks": _blocks,
}
