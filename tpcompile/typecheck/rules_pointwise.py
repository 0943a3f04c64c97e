"""Elementwise ops: what keeps a partial sum partial, and what uses it as if it were whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tpcompile.typecheck.gradients import described, join, wrong_gradient
from tpcompile.typecheck.layout import broadcast
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType
from tpcompile.typecheck.step import Result, Step, rule

_NEUTRAL = {"aten.isnan", "aten.isfinite", "aten.isinf", "aten.isneginf", "aten.isposinf"}
_NOT_MODELLED = {"aten.addcmul", "aten.addcdiv", "aten.lerp"}


def pointwise(step: Step) -> Result:
    """Any elementwise op without a rule of its own: nonlinear, so no operand may be partial."""
    types = aligned(step)
    if (bad := next((t for t in types if t.kind == "P"), None)) is None:
        return join(step, types)
    if step.name in _NEUTRAL | _NOT_MODELLED or any(t.kind == "U" for t in types):
        return UNKNOWN
    return used_as_whole(step, bad, "is not linear")


def used_as_whole(step: Step, partial: SpmdType, what: str) -> SpmdType:
    """Report that `step`, which `what`, reads a partial value before its reduce."""
    made = "" if partial.origin is None else f", made by {described(partial.origin)}"
    if partial.op in ("sum", "absolute"):
        return step.flag(
            "partial-used-as-whole",
            why=f"{step.name} {what} and reads a partial sum (P{made}): every rank has only its own summand",
            fix="all_reduce (or reduce_scatter) the partial sum before this op",
        )
    return step.flag(
        "local-statistic",
        why=f"{step.name} reads a {partial.op} over the sharded dim{made}: a statistic of the local shard only",
        fix="make the statistic global first: all-reduce the sum (dst='R') and divide by the global count, or "
        "all-reduce with the matching op",
    )


def aligned(step: Step) -> list[SpmdType]:
    """Types of all operands on the dims of the result."""
    return [broadcast(step, tensor, type_) for tensor, type_ in step.operands()]


@rule(
    "aten.neg", "aten.clone", "aten._to_copy", "aten.alias", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.positive",
    "aten.contiguous", "aten.view_as", "aten.real", "aten.tril", "aten.triu", "aten.native_dropout", "aten.dropout",
)  # fmt: skip
def _linear(step: Step) -> Result:
    """Linear in its only operand: every type stays."""
    return step.type_at(0, "self")


@rule("aten.pow")
def _power(step: Step) -> Result:
    """The square of a local 2-norm is a sum of squares."""
    is_square = step.type_at(0).op == "norm" and step.arg(1, "exponent") == 2
    return replace(step.type_at(0), op="sum") if is_square else pointwise(step)


@rule("aten.abs")
def _absolute(step: Step) -> Result:
    """Not linear, but the first half of isfinite: judged by who reads it."""
    x = step.type_at(0)
    return replace(x, op="absolute") if x.kind == "P" and x.op in ("sum", "absolute") else pointwise(step)


@rule("aten.eq", "aten.ne")
def _compared(step: Step) -> Result:
    """x == x and abs(x) != inf are how isnan and isfinite are made; any other comparison reads the value."""
    is_probe = step.args[0] is step.args[1] or (isinstance(step.args[1], float) and math.isinf(step.args[1]))
    return UNKNOWN if is_probe and step.type_at(0).kind == "P" else pointwise(step)


@rule("aten.detach")
def _detached(step: Step) -> Result:
    """No gradient any more."""
    return replace(step.type_at(0), grad=False)


@rule("aten.copy")
def _copied(step: Step) -> Result:
    """The destination takes the type of the source."""
    return broadcast(step, step.args[1], step.type_at(1)) if isinstance(step.args[1], Tensor) else CONSTANT


@rule("aten.fill", "aten.zero")
def _filled(step: Step) -> Result:
    """The destination becomes a constant."""
    return SpmdType("C", is_zero=step.name == "aten.zero" or _is_zero(step.arg(1, "value")))


@rule("aten.add", "aten.sub", "aten.rsub")
def added(step: Step) -> Result:
    """P + P is partial; P + a whole tensor counts that tensor once per rank."""
    numbers = [value for value in step.args[:2] if isinstance(value, (int, float, complex)) and value != 0]
    return sum_of(step, aligned(step), adds_number=bool(numbers))


def sum_of(step: Step, types: Sequence[SpmdType], *, adds_number: bool = False) -> SpmdType:
    """Type of a sum of terms on the dims of the result, and perhaps of a number that is equal on all ranks."""
    terms = [t for t in types if not t.is_zero]
    partial = [t for t in terms if t.kind == "P"]
    if not partial:
        return join(step, terms or types)
    if any(t.kind == "U" for t in terms) or len({t.op for t in partial}) > 1:
        return UNKNOWN
    first = replace(partial[0], grad=any(t.grad for t in terms))
    # A constant tensor made in the forward, or a V of unknown dim, may well be this rank's own summand.
    others = [t for t in terms if t.kind in ("I", "R") or t.is_known_shard]
    if others:
        return _whole_plus_partial(step, first, others)
    # The largest local value plus a number is the largest of the sums; a mean shifts as well.
    shifts = first.op in ("max", "min", "mean")
    return used_as_whole(step, first, "adds a number to it") if adds_number and not shifts else first


def _whole_plus_partial(step: Step, partial: SpmdType, others: Sequence[SpmdType]) -> SpmdType:
    whole = next((t for t in others if t.is_whole), None)
    if partial.op != "sum" or whole is None:
        return used_as_whole(step, partial, "adds it to a value that is not partial")
    made = "" if partial.origin is None else f" made by {described(partial.origin)}"
    return step.flag(
        "bias-before-reduce",
        why=f"a replicated tensor ({whole}) is added to the partial sum{made}: a reduce behind this op counts it "
        f"{step.world} times, and without one every rank goes on with another sum",
        fix="all_reduce the partial sum first, then add",
    )


@rule("aten.mul", "aten.div", "aten.true_divide")
def multiplied(step: Step) -> Result:
    """P times a whole factor is partial; a P in a divisor, or two P, are not linear."""
    types = aligned(step)
    partial = [t for t in types if t.kind == "P"]
    if not partial:
        return join(step, types)
    if any(t.kind == "U" for t in types):
        return UNKNOWN
    below = step.name != "aten.mul" and step.type_at(1).kind == "P"
    if len(partial) > 1 or below:
        return used_as_whole(step, partial[0], "divides by it" if below else "multiplies two partial values")
    return partial_times(step, partial[0], [t for t in types if t.kind != "P"])


def partial_times(step: Step, partial: SpmdType, factors: Sequence[SpmdType]) -> SpmdType:
    """Type of a partial value times factors that are not partial."""
    if any(t.kind == "U" or (t.kind == "V" and t.dim is None) for t in factors):
        return UNKNOWN
    if any(t.kind == "V" for t in factors):
        return used_as_whole(step, partial, "multiplies it by a shard")
    if (wrong := wrong_gradient(step, factors, partial=True)) is not None:
        return wrong
    return replace(partial, grad=partial.grad or any(t.grad for t in factors))


@rule("aten.where")
def _where(step: Step) -> Result:
    """A mask keeps a partial sum partial when the other branch is partial or zero."""
    types = aligned(step)
    partial = [t for t in types if t.kind == "P"]
    if not partial or step.arg(1, "self") is None:
        return join(step, types)
    branches = [step.type_at(1), step.type_at(2)]
    if all(t.kind == "P" or t.is_zero for t in branches) or _is_zero(step.args[2]) or _is_zero(step.args[1]):
        return replace(partial[0], grad=any(t.grad for t in types)) if step.type_at(0).is_whole else UNKNOWN
    is_certain = all(t.kind in ("P", "I", "R") for t in branches)
    return used_as_whole(step, partial[0], "chooses between it and a whole value") if is_certain else UNKNOWN


@rule("aten.masked_fill")
def _masked(step: Step) -> Result:
    """Filling with zero is linear."""
    types = aligned(step)
    if types[0].kind != "P":
        return join(step, types[:2])
    is_linear = _is_zero(step.arg(2, "value")) and types[1].is_whole
    return types[0] if is_linear else UNKNOWN


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0
