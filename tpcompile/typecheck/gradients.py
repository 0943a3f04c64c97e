"""Types of the operands of one op -> the type of its result, and a violation where their gradients do not fit."""

from __future__ import annotations

from dataclasses import replace

from tpcompile.typecheck import wording
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, Kind, SpmdType, Types
from tpcompile.typecheck.step import Step


def join(step: Step, types: Types) -> SpmdType:
    """Type of a result that depends on all `types`, none of them partial, on dims of the result.

    Reports I beside V (missing copy_to_tp, or a reduce with the wrong dst) and I beside R.
    """
    if types.has("U"):
        return UNKNOWN
    wrong = wrong_gradient(step, types)
    if wrong is not None:
        return wrong
    varying = types.of_kind("V")
    if len(varying.dims - {None}) > 1:
        return step.flag(wording.MIXED_SHARDS, dims=" and ".join(map(str, varying)))
    if not varying:
        if not types:
            return CONSTANT
        return SpmdType(whole_kind(types), types.grad, origin=types.deciding.origin)
    # A mask (V of unknown dim, no gradient) leaves the shard beside it as it is.
    shards = Types(t for t in varying if t.dim is not None or t.grad)
    found = (shards or varying).shard
    is_masked = found.is_masked or len(shards) < len(varying)
    return replace(found, grad=types.grad, is_masked=is_masked)


def whole_kind(types: Types) -> Kind:
    """Kind of a value made of whole values: those with a gradient decide."""
    kinds = types.deciding.kinds
    if "R" in kinds:
        return "R"
    return "I" if "I" in kinds else "C"


def wrong_gradient(step: Step, types: Types, *, partial: bool = False) -> SpmdType | None:
    """Report an operand whose gradient this op breaks; None when there is none.

    `partial`: the op's result is a partial sum, so the gradient of a replicated factor is partial as well.
    """
    if not step.differentiable:
        return None
    with_gradient = types.with_gradient
    if any(t.replicated_rows is not None for t in with_gradient):
        return step.flag(wording.MISSING_COPY_OF_REPLICAS)
    equal = with_gradient.of_kind("I")
    summed = with_gradient.of_kind("R")
    differs_per_rank = partial or types.has("V")
    if not equal or not (differs_per_rank or summed):
        return None
    if equal[0].origin.maker == "hooked":
        step.why_not_judged = f"a hook on the gradient of {equal[0].origin} may sum it"
        return UNKNOWN
    if equal[0].origin.maker == "parameter":
        return step.flag(wording.UNDECLARED, x=equal[0])
    if differs_per_rank and equal[0].is_reduced:
        return step.flag(wording.NEEDS_R, x=equal[0])
    if differs_per_rank:
        return step.flag(wording.MISSING_COPY)
    if summed[0].is_reduced:
        return step.flag(wording.NEEDS_I, x=summed[0])
    return step.flag(wording.MISSING_COPY_BESIDE_R)
