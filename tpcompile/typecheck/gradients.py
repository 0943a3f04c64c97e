"""Types of operands that meet in one op -> the type of what they make, and what their gradients say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.typecheck.spmd import UNKNOWN, Kind, Origin, SpmdType
from tpcompile.typecheck.step import Step

_REDUCES = ("all_reduce", "_c10d_functional.all_reduce", "all_gather", "_c10d_functional.all_gather")


def join(step: Step, types: Sequence[SpmdType]) -> SpmdType:
    """Type of a result that depends on all `types`, none of them partial, on dims of the result.

    Reports I beside V (missing copy_to_tp, or a reduce with the wrong dst) and I beside R.
    """
    if any(t.kind == "U" for t in types):
        return UNKNOWN
    if (wrong := wrong_gradient(step, types)) is not None:
        return wrong
    grad = any(t.grad for t in types)
    if any(t.kind == "V" for t in types):
        return replace(_shard_of([t for t in types if t.kind == "V"]), grad=grad)
    return SpmdType(whole_kind(types), grad, origin=_common_origin(types, grad))


def whole_kind(types: Sequence[SpmdType]) -> Kind:
    """Kind of what is made of whole values: those with a gradient decide."""
    kinds = {t.kind for t in types if t.grad} or {t.kind for t in types}
    return "R" if "R" in kinds else "I" if "I" in kinds else "C"


def wrong_gradient(step: Step, types: Sequence[SpmdType], *, partial: bool = False) -> SpmdType | None:
    """Report an operand whose gradient this op breaks; None when there is none.

    `partial`: the op's result is a partial sum, so the gradient of a replicated factor is partial as well.
    """
    equal = next((t for t in types if t.wants_equal_gradient), None)
    summed = next((t for t in types if t.wants_summed_gradient), None)
    if equal is None or not step.differentiable:
        return None
    if partial or any(t.kind == "V" for t in types):
        return _equal_in_varying_work(step, equal)
    return None if summed is None else _equal_beside_summed(step, equal, summed)


def _equal_in_varying_work(step: Step, equal: SpmdType) -> SpmdType:
    if equal.origin is not None and equal.origin.what.startswith(_REDUCES):
        return step.flag(
            "needs-dst-R",
            why=f"the result of {described(equal.origin)} is read by work that differs per rank, so its gradient is "
            "another one on each rank and nobody sums it",
            fix="reduce it with dst='R' (all-reduce of the gradient), or pass it through copy_to_tp where only here "
            "the work differs per rank",
        )
    return step.flag(
        "missing-copy",
        why="a replicated tensor (I) is read by work that differs per rank, so its gradient stays partial on each rank",
        fix="pass the replicated tensor through copy_to_tp first: identity forward, all-reduce of the gradient",
    )


def _equal_beside_summed(step: Step, equal: SpmdType, summed: SpmdType) -> SpmdType:
    if summed.origin is not None and summed.origin.what.startswith(_REDUCES):
        return step.flag(
            "needs-dst-I",
            why=f"the result of {described(summed.origin)} has a gradient that is summed over the ranks, but it meets "
            "a replicated tensor (I) in work all ranks repeat: its gradient is counted once per rank",
            fix="give the collective dst='I'; or, where the work behind it does differ per rank, pass the replicated "
            "tensor through copy_to_tp",
        )
    return step.flag(
        "missing-copy",
        why="a tensor inside the parallel region (R, partial gradient) meets a replicated tensor (I) that never "
        "entered it: one of the two gradients is wrong",
        fix="pass the replicated tensor through copy_to_tp as well",
    )


def described(origin: Origin) -> str:
    """The op and its line, for a message."""
    return f"{origin.what} at {origin.site.file}:{origin.site.line}"


def _shard_of(types: Sequence[SpmdType]) -> SpmdType:
    """Masks (V of unknown dim, no gradient) leave the shard as it is; two different shards make an unknown one."""
    shards = [t for t in types if t.dim is not None or t.grad] or list(types)
    first = shards[0]
    same = all((t.dim, t.left) == (first.dim, first.left) for t in shards)
    return first if same else first.with_dim(None)


def _common_origin(types: Sequence[SpmdType], grad: bool) -> Origin | None:
    """The origin of those that decide the gradient, when there is only one."""
    found = {t.origin for t in types if t.grad or not grad}
    return found.pop() if len(found) == 1 else None
