"""Types of the operands of one op -> the type of its result, and a violation where their gradients do not fit."""

from __future__ import annotations

from dataclasses import replace

from tpcompile.typecheck.spmd import UNKNOWN, Kind, SpmdType, Types
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
        return mixed_shards(step, varying)
    if varying:
        return _joined_shards(varying, grad=types.grad)
    return SpmdType(whole_kind(types), types.grad, origin=types.deciding.origin)


def _joined_shards(varying: Types, *, grad: bool) -> SpmdType:
    """Type of an op on shards of one dim; a mask (V of unknown dim, no gradient) leaves the shard as it is."""
    shards = Types(t for t in varying if t.dim is not None or t.grad)
    is_masked = len(shards) < len(varying)
    found = (shards or varying).shard
    return replace(found, grad=grad, is_masked=found.is_masked or is_masked)


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
        return step.flag(
            "missing-copy",
            why=f"{step.name} reads rows that neighbouring ranks hold too (replicas, as of a kv head): each of these "
            "ranks has a part of their gradient, and nothing adds the parts up",
            fix="pass these rows through copy_to_tp over the ranks that share them: comm.replicas(n).copy_to_tp(rows)",
        )
    equal = with_gradient.of_kind("I")
    summed = with_gradient.of_kind("R")
    if not equal:
        return None
    if partial or types.has("V"):
        return _equal_in_varying_work(step, equal[0])
    if summed:
        return _equal_beside_summed(step, equal[0], summed[0])
    return None


def mixed_shards(step: Step, varying: Types) -> SpmdType:
    """Report shards of different dims in one op."""
    dims = " and ".join(map(str, varying))
    return step.flag(
        "mixed-shards",
        why=f"the operands are shards of different dims ({dims}, counted on the result): every rank computes a block "
        "of its own, and the other blocks of the whole result are computed nowhere",
        fix="bring both into one layout first: all_gather one of them",
    )


def _undeclared(step: Step, equal: SpmdType) -> SpmdType:
    return step.flag(
        "undeclared-layout",
        why=f"{equal.made('{}')} is used in work that differs per rank, and no layout is declared for it, so it is "
        "taken for replicated",
        fix="if each rank holds a shard of it, declare that: in shard_specs() of its module, or "
        "parameter_types={'NAME': 'V(0)'}; if it is the same on all ranks, pass it through copy_to_tp first",
    )


def _equal_in_varying_work(step: Step, equal: SpmdType) -> SpmdType:
    if equal.is_undeclared:
        return _undeclared(step, equal)
    if equal.is_reduced:
        return step.flag(
            "needs-dst-R",
            why=f"the result of {equal.origin} is read by work that differs per rank, so its gradient is "
            "different on each rank and is not summed",
            fix="reduce it with dst='R' (all-reduce of the gradient), or pass it through copy_to_tp where only here "
            "the work differs per rank",
        )
    return step.flag(
        "missing-copy",
        why="a replicated tensor (I) is read by work that differs per rank, so its gradient stays partial on each rank",
        fix="pass the replicated tensor through copy_to_tp first: identity forward, all-reduce of the gradient",
    )


def _equal_beside_summed(step: Step, equal: SpmdType, summed: SpmdType) -> SpmdType:
    if equal.is_undeclared:
        return _undeclared(step, equal)
    if summed.is_reduced:
        return step.flag(
            "needs-dst-I",
            why=f"the result of {summed.origin} has a gradient that is summed over the ranks, but it is combined with "
            "a replicated tensor (I) in work that all ranks repeat: its gradient is counted once per rank",
            fix="give the collective dst='I'; or, where the work behind it does differ per rank, pass the replicated "
            "tensor through copy_to_tp",
        )
    return step.flag(
        "missing-copy",
        why="a tensor inside the parallel region (R, partial gradient) is combined with a replicated tensor (I) that "
        "never entered it: one of the two gradients is wrong",
        fix="pass the replicated tensor through copy_to_tp as well",
    )
