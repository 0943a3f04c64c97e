"""Elementwise ops: which keep a partial sum partial, and which use it as if it were whole."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from tpcompile.evidence.iterables import find
from tpcompile.typecheck.gradients import join, wrong_gradient
from tpcompile.typecheck.layout import broadcast
from tpcompile.typecheck.ops import order_of
from tpcompile.typecheck.rules_scale import is_times_ranks, multiplier, weighted, weights_of
from tpcompile.typecheck.scale import is_close
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, ZERO, Pending, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, is_zero, rule
from tpcompile.typecheck.summand import wrong_summand


def pointwise(step: Step) -> Result:
    """Any elementwise op without a rule of its own: nonlinear, so no operand may be partial."""
    types = aligned(step)
    partial = types.of_kind("P")
    if not partial:
        return join(step, types)
    if types.has("U"):
        return UNKNOWN
    return used_as_whole(step, partial[0], "is not linear")


@rule(
    "aten.isnan", "aten.isfinite", "aten.isinf", "aten.isneginf", "aten.isposinf",
    "aten.addcmul", "aten.addcdiv", "aten.lerp",
)  # fmt: skip
def _not_judged(step: Step) -> Result:
    """A partial operand of a probe for inf and NaN is right; for fused products and sums it is not followed."""
    types = aligned(step)
    return UNKNOWN if types.has("P") else join(step, types)


def used_as_whole(step: Step, partial: SpmdType, what: str) -> SpmdType:
    """Report that `step` reads a partial value before its reduce; `what` says what the op does with it."""
    made = partial.made(", made by {}")
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


def aligned(step: Step) -> Types:
    """Types of all operands, with the sharded dim counted on the result."""
    return Types(broadcast(step, tensor, type_) for tensor, type_ in step.operands())


@rule(
    "aten.clone", "aten._to_copy", "aten.alias", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.positive",
    "aten.contiguous", "aten.view_as", "aten.real", "aten.native_dropout", "aten.dropout",
)  # fmt: skip
def _linear(step: Step) -> Result:
    """Linear in its only operand: every type stays."""
    return step.type_at(0, "self")


@rule("aten.neg")
def _negated(step: Step) -> Result:
    """Linear; the largest of the negatives is the negative of the smallest."""
    x = step.type_at(0)
    return replace(x, op=_op_of_negative(x.op))


def _op_of_negative(op: str) -> str:
    return {"max": "min", "min": "max"}.get(op, op)


@rule("aten.tril", "aten.triu")
def _triangle(step: Step) -> Result:
    """The diagonal of a shard of rows or columns is not that of the whole matrix; the first rank's may be."""
    x = step.args[0]
    type_ = step.type_at(0)
    matrix_dims = (x.dim() - 2, x.dim() - 1)
    is_matrix_shard = type_.is_known_shard and type_.dim in matrix_dims
    diagonal = step.arg(1, "diagonal", 0)
    is_at_origin = abs(diagonal) <= 1
    if is_matrix_shard and is_at_origin and step.rank > 0:
        return step.flag(
            "local-positions",
            why=f"{step.name} takes the diagonal of the local block, and dim {type_.dim} is sharded: on rank "
            f"{step.rank} it begins elsewhere",
            fix="compare global positions, which begin at rank_index * local length",
        )
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
    """The square of a local 2-norm is a partial sum of squares, as that of any norm to its order."""
    x = step.type_at(0)
    order = order_of(x.op)
    exponent = step.arg(1, "exponent")
    is_sum_of_powers = order and exponent == order
    if is_sum_of_powers:
        return replace(x, op="sum")
    return pointwise(step)


@rule("aten.abs")
def _absolute(step: Step) -> Result:
    """Not linear, but the first half of isfinite: the op that reads the result is judged."""
    x = step.type_at(0)
    if x.kind == "P" and x.op in ("sum", "absolute"):
        return replace(x, op="absolute")
    return pointwise(step)


@rule("aten.eq", "aten.ne")
def _compared(step: Step) -> Result:
    """x == x and abs(x) != inf are how isnan and isfinite are made; any other comparison reads the value."""
    left, right = step.args[:2]
    is_infinity = isinstance(right, float) and math.isinf(right)
    is_probe = is_infinity or left is right
    return UNKNOWN if is_probe and step.type_at(0).kind == "P" else _ordered(step)


@rule("aten.ge", "aten.gt", "aten.le", "aten.lt")
def _ordered(step: Step) -> Result:
    """A local extremum beside one of all ranks: whether this rank has it."""
    types = step.types
    found = types.of_kind("P").ops
    is_extremum = found in ({"max"}, {"min"})
    if is_extremum and any(type_.is_reduced for type_ in types.of_kind("I", "R")):
        return SpmdType("V")
    return pointwise(step)


@rule("aten.detach")
def _detached(step: Step) -> Result:
    """The same value without a gradient."""
    return replace(step.type_at(0), grad=False)


@rule("aten.copy")
def _copied(step: Step) -> Result:
    """The destination takes the type of the source."""
    source = step.args[1]
    return broadcast(step, source, step.type_at(1)) if isinstance(source, Tensor) else CONSTANT


@rule("aten.fill", "aten.zero")
def _filled(step: Step) -> Result:
    """The destination becomes a constant."""
    fills_zeros = step.name == "aten.zero" or is_zero(step.arg(1, "value"))
    return ZERO if fills_zeros else CONSTANT


@rule("aten.add", "aten.sub", "aten.rsub")
def added(step: Step) -> Result:
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
    terms = types.nonzero
    partial = terms.of_kind("P")
    if not partial:
        return join(step, terms)
    if terms.has("U"):
        return UNKNOWN
    if len(partial.ops) > 1:  # such as a partial sum plus a partial maximum
        return UNKNOWN
    first = replace(partial[0], grad=terms.grad)
    return _sum_with_partial(step, first, terms, adds_number=adds_number)


def _sum_with_partial(step: Step, partial: SpmdType, terms: Types, *, adds_number: bool) -> SpmdType:
    """Type of partial terms plus the others; a constant tensor or a V of unknown dim may be this rank's own summand."""
    whole = terms.of_kind("I", "R")
    shards = Types(t for t in terms if t.is_known_shard)
    if whole and partial.op == "sum":
        wrong = _wrong_summand(step, partial, whole)
        if wrong is not None:
            return wrong
    if shards:
        return _shards_with_partial(step, partial, terms, shards)
    if whole and partial.op != "sum":
        return _whole_with_partial(step, partial, terms)
    # The largest local value plus a number is the largest of the sums; a mean shifts as well.
    shifts = partial.op in ("max", "min", "mean")
    if adds_number and not shifts:
        return used_as_whole(step, partial, "adds a number to it")
    return partial


def _whole_with_partial(step: Step, partial: SpmdType, terms: Types) -> SpmdType:
    if partial.op not in _SHIFTED:
        return used_as_whole(step, partial, _ADDS)
    is_shifted = step.name == "aten.add" or _is_minuend(step)
    return partial if is_shifted else SpmdType("V", terms.grad)


def _shards_with_partial(step: Step, partial: SpmdType, terms: Types, shards: Types) -> SpmdType:
    is_subtracted = step.name == "aten.sub" and not _is_minuend(step)
    kind = _SHIFT_BY.get(partial.op)
    if is_subtracted and kind is not None:
        pending = _local_shift(step, partial, kind)
        return replace(shards.shard, grad=terms.grad, pending=pending)
    return used_as_whole(step, partial, _ADDS)


def _is_minuend(step: Step) -> bool:
    """True when the partial operand is the one that is subtracted from."""
    return step.name == "aten.sub" and step.type_at(0).kind == "P"


_SHIFT_BY = {"max": "shift", "logsumexp": "shift", "mean": "moment"}
_ADDS = "adds it to a value that is not partial"
_SHIFTED = ("max", "min", "logsumexp")
"""Reductions of x minus a number that are the reduction of x minus the number."""


_GLOBAL_FIRST = {
    "shift": "all-reduce the maximum first; or multiply by exp(local - global maximum) before the sum over the ranks",
    "moment": "make the mean global first: all-reduce the sum (dst='R') and divide by the global count; or add to the "
    "sum of squares those of the gathered means around the global one",
}


def _local_shift(step: Step, partial: SpmdType, kind: str) -> Pending:
    made = partial.made(", made by {}")
    return step.pending(
        kind,
        "local-statistic",
        why=f"{step.name} subtracts a {partial.op} over the sharded dim{made}: a statistic of the local shard only",
        fix=_GLOBAL_FIRST[kind],
    )


def _wrong_summand(step: Step, partial: SpmdType, whole: Types) -> SpmdType | None:
    """The first whole term that a sum over the ranks would not have once, with its gradient.

    Beside a partial sum times the number of ranks it is judged as a term of an average, which nobody knows yet.
    """
    added = f"is added to the partial sum{partial.made(' made by {}')}"
    fix = "all_reduce the partial sum first, then add"
    is_before_average = is_times_ranks(step, partial)
    if is_before_average:
        whole = Types(weighted(step, each, 1 / step.world) for each in whole)
        added = "(by the average that has to follow) is added"
    judged = [wrong_summand(step, each, added=added, fix=fix) for each in whole]
    return UNKNOWN if is_before_average else find(judged, lambda wrong: wrong is not None)


@rule("aten.mul", "aten.div", "aten.true_divide")
def multiplied(step: Step) -> Result:
    """P times a whole factor is partial; a P in a divisor, or two P, are not linear."""
    types = aligned(step)
    if _divides_by_ranks(step):
        step.is_judged = False
    if not types.has("P"):
        return join(step, types)
    if types.has("U"):
        return UNKNOWN
    divides_by_partial = step.name != "aten.mul" and step.type_at(1).kind == "P"
    if divides_by_partial:
        return used_as_whole(step, types.of_kind("P")[0], "divides by it")
    return product_with_partial(step, types)


def _divides_by_ranks(step: Step) -> bool:
    """True when the sum of a product over the ranks is divided by their number: a mean is meant, or it is a mistake."""
    if step.name == "aten.mul":
        return False
    x = step.type_at(0)
    divisor = step.number_in(step.args[1])
    is_summand = x.is_partial_of("sum") and x.made_by != "aten.sum"
    is_sum = x.grad and x.maker == "all_reduce"
    is_followed = is_summand or is_sum
    return is_followed and divisor == step.world


def product_with_partial(step: Step, types: Types) -> SpmdType:
    """Type of a product in which at least one factor is partial."""
    partial = types.of_kind("P")
    factors = types.without("P")
    varying = factors.of_kind("V")
    if len(partial) > 1:
        return used_as_whole(step, partial[0], "multiplies two partial values")
    if factors.has("U") or None in varying.dims:
        return UNKNOWN
    if varying:
        return used_as_whole(step, partial[0], "multiplies it by a shard")
    wrong = wrong_gradient(step, factors, partial=True)
    if wrong is not None:
        return wrong
    return replace(partial[0], grad=types.grad, op=_op_of_scaled(step, partial[0]))


def _op_of_scaled(step: Step, partial: SpmdType) -> str:
    """A local mean times its count, or over the number of ranks, is a summand; any number but a fraction may be."""
    if step.name not in ("aten.mul", "aten.div"):
        return partial.op
    factor = multiplier(step)
    if factor is not None and factor < 0:
        partial = replace(partial, op=_op_of_negative(partial.op))
    if partial.op != "mean":
        return partial.op
    if factor is None:
        return "sum"
    is_summand = factor > 1 or is_close(factor * step.world, 1)
    return "sum" if is_summand else "mean"


@rule("aten.where")
def _where(step: Step) -> Result:
    """A mask keeps a partial sum partial when the other branch is partial or zero."""
    types = aligned(step)
    partial = types.of_kind("P")
    if not partial:
        return join(step, types)
    mask = step.type_at(0)
    branches = Types([step.type_at(1), step.type_at(2)])
    stays_partial = branches.nonzero.kinds == {"P"}
    mixes_whole = branches.kinds <= {"P", "I", "R"}
    if stays_partial and mask.is_whole:
        return replace(partial[0], grad=types.grad)
    if stays_partial or not mixes_whole:
        return UNKNOWN
    return used_as_whole(step, partial[0], "chooses between it and a whole value")


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
