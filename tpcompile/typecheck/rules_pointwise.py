"""Elementwise ops: which keep a partial sum partial, and which use it as if it were whole."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from tpcompile.evidence.iterables import find
from tpcompile.typecheck import wording
from tpcompile.typecheck.gradients import join, wrong_gradient
from tpcompile.typecheck.layout import aligned, broadcast
from tpcompile.typecheck.ops import SCALINGS, SUMS
from tpcompile.typecheck.rules_scale import is_times_ranks, multiplier, weighted, weights_of
from tpcompile.typecheck.scale import is_close
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, ZERO, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, is_zero, rule
from tpcompile.typecheck.summand import wrong_summand

_ADDS = "adds it to a value that is not partial"
_OF_NEGATIVE = {"max": "min", "min": "max"}
"""The largest of the negatives is the negative of the smallest."""
_SHIFT_BY = {
    "max": ("shift", wording.LOCAL_MAXIMUM),
    "logsumexp": ("shift", wording.LOCAL_MAXIMUM),
    "mean": ("moment", wording.LOCAL_MEAN),
}
"""Statistic of the shard -> what the shard minus it is."""
_SHIFTED = ("max", "min", "logsumexp")
"""Reductions whose sum with a value that is equal on all ranks is the reduction of the sums."""
_SHIFTED_BY_NUMBERS = (*_SHIFTED, "mean")
"""The same with a number. A mean plus a tensor is left out: its gradient depends on how the means are reduced."""


_NOT_JUDGED = {
    "aten.isnan", "aten.isfinite", "aten.isinf", "aten.isneginf", "aten.isposinf",
    "aten.addcmul", "aten.addcdiv", "aten.lerp",
}  # fmt: skip
"""A partial operand of a probe for inf and NaN is right; for fused products and sums it is not followed."""


@rule("aten.floor_divide", *_NOT_JUDGED)  # torch does not tag all of them as elementwise
def pointwise(step: Step) -> Result:
    """Any elementwise op without a rule of its own: nonlinear, so no operand may be partial."""
    types = aligned(step)
    partial = types.of_kind("P")
    if not partial:
        return join(step, types)
    if step.name in _NOT_JUDGED:
        return UNKNOWN
    return used_as_whole(step, partial[0], "is not linear")


def used_as_whole(step: Step, partial: SpmdType, what: str) -> SpmdType:
    """Report that `step` reads a partial value before its reduce; `what` says what the op does with it."""
    if partial.op in ("sum", "absolute"):
        return step.flag(wording.PARTIAL_USED, x=partial, what=what)
    return step.flag(wording.STATISTIC_USED, x=partial)


@rule(
    "aten.clone", "aten._to_copy", "aten.alias", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.positive",
    "aten.contiguous", "aten.view_as", "aten.real", "aten.native_dropout", "aten.dropout",
    "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
)  # fmt: skip
def _linear(step: Step) -> Result:
    """Linear in its only operand: every type stays."""
    return step.type_at(0, "self")


@rule("aten.neg")
def _negated(step: Step) -> Result:
    """Linear, but extrema change places."""
    x = step.type_at(0)
    return replace(x, op=_OF_NEGATIVE.get(x.op, x.op))


@rule("aten.tril", "aten.triu")
def _triangle(step: Step) -> Result:
    """The diagonal of a shard of rows or columns is not that of the whole matrix; the first rank's may be."""
    type_ = step.type_at(0)
    num_dims = step.args[0].dim()
    is_matrix_shard = type_.dim in (num_dims - 2, num_dims - 1)
    is_at_origin = abs(step.arg(1, "diagonal", 0)) <= 1
    if is_matrix_shard and is_at_origin and step.rank > 0:
        return step.flag(wording.LOCAL_DIAGONAL, x=type_)
    return type_


@rule("aten.exp")
def _exponential(step: Step) -> Result:
    """exp of a local log-sum-exp is a local sum; exp of a local maximum is this rank's own weight in a merge."""
    x = step.type_at(0)
    if x.is_partial_of("logsumexp"):
        return replace(x, op="sum")
    if x.is_partial_of("max"):
        return SpmdType("V", x.grad)
    return pointwise(step)


@rule("aten.pow")
def _power(step: Step) -> Result:
    """The square of a local 2-norm is a partial sum of squares, as that of any norm to its order (norm1, norminf)."""
    x = step.type_at(0)
    if not x.op.startswith("norm"):
        return pointwise(step)
    order = float(x.op.removeprefix("norm") or 2)
    if order == 0 or step.arg(1, "exponent") != order:
        return pointwise(step)
    return replace(x, op="sum")


@rule("aten.abs")
def _absolute(step: Step) -> Result:
    """Partial stays partial, although abs is not linear: it is the first half of isfinite, and its reader is judged."""
    x = step.type_at(0)
    if x.is_partial_of("sum", "absolute"):
        return replace(x, op="absolute")
    return pointwise(step)


@rule("aten.eq", "aten.ne")
def _compared(step: Step) -> Result:
    """x == x and abs(x) != inf are how isnan and isfinite are made; any other comparison reads the value."""
    left, right = step.args[:2]
    is_infinity = isinstance(right, float) and math.isinf(right)
    is_probe = is_infinity or left is right
    if is_probe and step.type_at(0).kind == "P":
        return UNKNOWN
    return _ordered(step)


@rule("aten.ge", "aten.gt", "aten.le", "aten.lt")
def _ordered(step: Step) -> Result:
    """A local extremum beside one of all ranks: whether this rank has it."""
    types = step.types
    is_extremum = types.of_kind("P").ops in ({"max"}, {"min"})
    if is_extremum and any(type_.is_reduced for type_ in types.of_kind("I", "R")):
        return SpmdType("V")
    return pointwise(step)


@rule("aten.copy")
def _copied(step: Step) -> Result:
    """The destination takes the type of the source."""
    source = step.args[1]
    if isinstance(source, Tensor):
        return broadcast(step, source, step.type_at(1))
    return CONSTANT


rule("aten.detach")(lambda step: replace(step.type_at(0), grad=False))
rule("aten.fill")(lambda step: step.type_in(step.arg(1, "value")))
rule("aten.zero")(lambda step: ZERO)


@rule(*SUMS)
def _added(step: Step) -> Result:
    """P + P is partial; P + a whole tensor counts that tensor once per rank."""
    terms = []
    adds_number = False
    for value, weight in zip(step.args[:2], weights_of(step), strict=False):
        if isinstance(value, Tensor):
            terms.append(broadcast(step, value, weighted(step, step.type_of(value), weight)))
        elif value:
            adds_number = True
    return sum_of(step, Types(terms), adds_number=adds_number)


def sum_of(step: Step, types: Types, *, adds_number: bool = False) -> SpmdType:
    """Type of a sum of terms on the dims of the result, and perhaps of a number that is equal on all ranks."""
    terms = Types(t for t in types if not t.is_zero)
    partial = terms.of_kind("P")
    if not partial:
        return join(step, terms)
    if len(partial.ops) > 1:  # such as a partial sum plus a partial maximum
        return UNKNOWN
    first = replace(partial[0], grad=terms.grad)
    if first.op == "sum":
        return _sum_with_partial_sum(step, first, terms, adds_number=adds_number)
    return _sum_with_statistic(step, first, terms, adds_number=adds_number)


def _sum_with_partial_sum(step: Step, partial: SpmdType, terms: Types, *, adds_number: bool) -> SpmdType:
    """Type of partial sums plus the others; a constant tensor or a V of unknown dim may be this rank's own summand."""
    wrong = _wrong_summand(step, partial, terms.of_kind("I", "R"))
    if wrong is not None:
        return wrong
    if any(t.is_known_shard for t in terms):
        return used_as_whole(step, partial, _ADDS)
    if adds_number:
        return used_as_whole(step, partial, "adds a number to it")
    return partial


def _sum_with_statistic(step: Step, partial: SpmdType, terms: Types, *, adds_number: bool) -> SpmdType:
    """Type of a statistic of the shard, such as a maximum, plus the others."""
    shards = Types(t for t in terms if t.is_known_shard)
    is_minuend = step.name == "aten.sub" and step.type_at(0).kind == "P"
    if shards:
        # A mean minus the values has the squares of the values minus the mean; exponentials do change with the order.
        is_difference = step.name == "aten.sub" and (partial.op == "mean" or not is_minuend)
        if not is_difference or partial.op not in _SHIFT_BY:
            return used_as_whole(step, partial, _ADDS)
        pending = step.pending(*_SHIFT_BY[partial.op], x=partial)
        return replace(shards.shard, grad=terms.grad, pending=pending)
    whole = terms.of_kind("I", "R")
    shifted = _SHIFTED if whole else _SHIFTED_BY_NUMBERS
    is_shifted = adds_number or len(whole) > 0
    if is_shifted and partial.op not in shifted:
        return used_as_whole(step, partial, _ADDS)
    if whole and not is_minuend and step.name != "aten.add":
        return SpmdType("V", terms.grad)
    return partial


def _wrong_summand(step: Step, partial: SpmdType, whole: Types) -> SpmdType | None:
    """The first whole term that a sum over the ranks would not have once, with its gradient.

    Beside a partial sum times the number of ranks it is judged as a term of an average, which nobody knows yet.
    """
    added = f"is added to the partial sum{partial.origin.made.removeprefix(',')}"
    is_before_average = is_times_ranks(step, partial)
    if is_before_average:
        whole = Types(weighted(step, each, 1 / step.world) for each in whole)
        added = "(by the average that has to follow) is added"
    fix = "all_reduce the partial sum first, then add"
    judged = [wrong_summand(step, each, added=added, fix=fix) for each in whole]
    if whole and is_before_average:
        return UNKNOWN
    return find(judged, lambda wrong: wrong is not None)


@rule(*SCALINGS)
def _multiplied(step: Step) -> Result:
    """P times a whole factor is partial; a P in a divisor, or two P, are not linear."""
    types = aligned(step)
    partial = types.of_kind("P")
    is_division = step.name != "aten.mul"
    if is_division and step.number_in(step.args[1]) == step.world:
        # The sum of a product over the ranks divided by their number: a mean is meant, or it is a mistake.
        x = step.type_at(0)
        is_summand = x.is_partial_of("sum") and x.origin.what != "aten.sum"
        is_sum = x.grad and x.origin.maker == "all_reduce"
        step.is_judged = not (is_summand or is_sum)
    if not partial:
        return join(step, types)
    if is_division and step.type_at(1).kind == "P":
        return used_as_whole(step, partial[0], "divides by it")
    return product_with_partial(step, types)


def product_with_partial(step: Step, types: Types) -> SpmdType:
    """Type of a product in which at least one factor is partial."""
    partial = types.of_kind("P")
    factors = types.without("P")
    varying = factors.of_kind("V")
    if len(partial) > 1:
        return used_as_whole(step, partial[0], "multiplies two partial values")
    if None in varying.dims:
        return UNKNOWN
    if varying:
        return used_as_whole(step, partial[0], "multiplies it by a shard")
    wrong = wrong_gradient(step, factors, partial=True)
    if wrong is not None:
        return wrong
    return replace(partial[0], grad=types.grad, op=_op_of_scaled(step, partial[0].op))


def _op_of_scaled(step: Step, op: str) -> str:
    """A local mean times its count, or over the number of ranks, is a summand; any number but a fraction may be."""
    if step.name not in ("aten.mul", "aten.div"):
        return op
    factor = multiplier(step)
    if op == "mean":
        is_summand = factor is None or factor > 1 or is_close(factor * step.world, 1)
        return "sum" if is_summand else "mean"
    if factor is None or factor >= 0:
        return op
    return _OF_NEGATIVE.get(op, op)


@rule("aten.where")
def _where(step: Step) -> Result:
    """A mask keeps a partial sum partial when the other branch is partial or zero."""
    types = aligned(step)
    partial = types.of_kind("P")
    if not partial:
        return join(step, types)
    mask = step.type_at(0)
    branches = Types([step.type_at(1), step.type_at(2)])
    nonzero = Types(branch for branch in branches if not branch.is_zero)
    if nonzero.kinds == {"P"}:
        if mask.is_whole:
            return replace(partial[0], grad=types.grad)
        return UNKNOWN
    if branches.kinds <= {"P", "I", "R"}:
        return used_as_whole(step, partial[0], "chooses between it and a whole value")
    return UNKNOWN


@rule("aten.masked_fill")
def _masked(step: Step) -> Result:
    """Filling with zero is linear."""
    x, mask = Types(aligned(step)[:2])
    if x.kind != "P":
        return join(step, Types([x, mask]))
    fills_zeros = is_zero(step.arg(2, "value"))
    if fills_zeros and mask.is_whole:
        return x
    return UNKNOWN
