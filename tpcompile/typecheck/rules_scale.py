"""Step and the types of its results -> these types with their scales: sums, numbers, views and other linear ops.

Any other result is a tensor of its own. So is what an op mixes along a dim: only its common multiple is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from torch import Tensor

from tpcompile.typecheck.ops import SAME_VALUE, VIEWS
from tpcompile.typecheck.scale import Factor, Scale, is_close, of_one_tensor, own_scale, product, total
from tpcompile.typecheck.spmd import Kind, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, is_zero

ScaleRule = Callable[[Step, int], Scale | None]
_SCALED: tuple[Kind, ...] = ("I", "R", "V", "P")


def with_scales(step: Step, result: Result) -> Result:
    """The types with the scales of the results; None where a result is a tensor of its own."""
    if isinstance(result, SpmdType):
        return _with_scale(step, result, 0)
    return [_with_scale(step, type_, place) for place, type_ in enumerate(result)]


def _with_scale(step: Step, type_: SpmdType, place: int) -> SpmdType:
    follow = SCALES.get(step.name)
    if type_.kind not in _SCALED or follow is None:
        return type_ if type_.scale is None else replace(type_, scale=None)
    return replace(type_, scale=follow(step, place))


def multiplier(step: Step) -> float | None:
    """The number that a product or quotient multiplies its other operand by; None where it is no number."""
    first, second = map(step.number_in, step.args[:2])
    if step.name == "aten.mul":
        return first if second is None else second
    is_rounded = "rounding_mode" in step.kwargs
    if is_rounded or not second:
        return None
    return 1 / second


def weighted(step: Step, type_: SpmdType, weight: float) -> SpmdType:
    """The type of a term that an op multiplies by `weight`, an argument of it such as `alpha`."""
    if type_.kind not in _SCALED or weight == 1:
        return type_
    return replace(type_, scale=type_.multiples.times(weight, step.world))


def weights_of(step: Step) -> tuple[float, float]:
    """What a sum multiplies its two terms by."""
    alpha = _number_named(step, "alpha")
    beta = _number_named(step, "beta")
    weights = {"aten.sub": (1.0, -alpha), "aten.rsub": (-alpha, 1.0)}
    return weights.get(step.name, (beta, alpha))


def _number_named(step: Step, name: str) -> float:
    value = step.kwargs.get(name, 1)
    return float(value) if isinstance(value, (int, float)) else 1.0


def _viewed(step: Step, place: int) -> Scale:
    """The same tensor where the view only has other dims in front, as a sum would broadcast it."""
    x, part = step.args[0], step.results[place]
    scale = step.type_at(0).multiples
    if _broadcast(x) == _broadcast(part) or step.name == "aten.expand":
        return scale
    arguments = (*step.args[1:], step.kwargs, place)
    return scale.viewed(f"{step.name}{arguments}")


def _broadcast(tensor: Tensor) -> list[int]:
    """The shape from the first dim that is not of size 1."""
    return list(dropwhile(lambda size: size == 1, tensor.shape))


def _linear(step: Step, place: int) -> Scale:
    """Linear in the first operand."""
    return step.type_at(0).multiples.anew()


def _added(step: Step, place: int) -> Scale:
    terms = zip(step.args[:2], weights_of(step), strict=False)
    types = Types(weighted(step, step.type_in(value), weight) for value, weight in terms)
    return total(_scales_of(types))


def _multiplied(step: Step, place: int) -> Scale | None:
    number = multiplier(step)
    if number is None:
        return _product(step, *step.args[:2])
    return total(_scales_of(step.types)).times(number, step.world)


def _scales_of(types: Types) -> list[Scale]:
    """The scales of the terms that have the kind of their sum: the partial ones, the shards, or the whole ones."""
    deciding = types.of_kind("P") or types.of_kind("V") or types.of_kind("I", "R")
    return [type_.multiples for type_ in deciding]


def is_times_ranks(step: Step, type_: SpmdType) -> bool:
    """True when the value was multiplied by the number of ranks, as before an average that is to be a sum."""
    factor = type_.multiples.factor
    return factor is not None and is_close(factor.value, step.world)


def _matrix_product_plus(step: Step, place: int) -> Scale:
    """The scale of beta * input + alpha * product."""
    beta, alpha = weights_of(step)
    bias = weighted(step, step.type_at(0), beta)
    plain = _product(step, *step.args[1:3]) or own_scale()
    return total([plain.times(alpha, step.world), *_scales_of(Types([bias]))])


def _product(step: Step, left: Any, right: Any) -> Scale | None:
    """The scale of a product or quotient of two tensors; None where neither is multiplied."""
    first = _factor_of(step, left)
    second = _factor_of(step, right)
    is_quotient = step.name in ("aten.div", "aten.true_divide")
    if is_quotient and second is not None:
        second = second.inverse()
    found = product(first, second)
    is_own = found is not None and found.is_own
    return None if is_own else of_one_tensor(found)


def _factor_of(step: Step, value: Any) -> Factor | None:
    """The multiple of a factor of a product; None for a number that cannot be read, and for different multiples."""
    if not isinstance(value, Tensor):
        return None
    type_ = step.type_of(value)
    is_number = value.numel() == 1 and not type_.grad
    if is_number:
        return None
    if type_.kind in _SCALED:
        return type_.multiples.factor
    return Factor(gradient=0.0)


def _joined(step: Step, place: int) -> Scale:
    """Parts, or branches, of one tensor: a sum of tensors that are zero in the other parts."""
    return total([scale.anew() for scale in _scales_of(step.types)])


def _masked(step: Step, place: int) -> Scale | None:
    """Filled with zeros, as a multiple of the operand; with anything else a tensor of its own."""
    return _linear(step, place) if is_zero(step.arg(2, "value")) else None


_RULES: dict[ScaleRule, set[str]] = {
    lambda step, place: step.type_at(0, "self").multiples: SAME_VALUE,
    lambda step, place: step.type_at(1).multiples: {"aten.copy"},
    lambda step, place: step.type_at(0).multiples.times(-1, step.world): {"aten.neg"},
    lambda step, place: _product(step, *step.args[:2]): {"aten.mm", "aten.bmm", "aten.mv", "aten.dot"},
    _viewed: VIEWS,
    _linear: {
        "aten.sum", "aten.mean", "aten.index_select", "aten.embedding", "aten.gather", "aten.cumsum", "aten.flip",
        "aten.roll", "aten.tril", "aten.triu", "aten.native_dropout", "aten.dropout", "aten.repeat",
    },
    _added: {"aten.add", "aten.sub", "aten.rsub"},
    _multiplied: {"aten.mul", "aten.div", "aten.true_divide"},
    _matrix_product_plus: {"aten.addmm", "aten.baddbmm", "aten.addmv"},
    _joined: {"aten.cat", "aten.stack", "aten.where"},
    _masked: {"aten.masked_fill"},
}  # fmt: skip
SCALES = {name: rule for rule, names in _RULES.items() for name in names}
