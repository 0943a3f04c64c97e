"""Step and the types of its results -> these types with their scales: sums, numbers, views and other linear ops.

Any other result is a tensor of its own. So is what an op mixes along a dim: only its common multiple is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from torch import Tensor

from tpcompile.typecheck.ops import LABELS, PACKS, PRODUCT_OF, SAME_VALUE, SCALINGS, SUMS, VIEWS
from tpcompile.typecheck.scale import Factor, Scale, is_close, own_scale, product, total
from tpcompile.typecheck.spmd import Kind, SpmdType, Types
from tpcompile.typecheck.step import Step, is_zero

_SCALED: tuple[Kind, ...] = ("I", "R", "V", "P")


def with_scales(step: Step, types: Sequence[SpmdType]) -> list[SpmdType]:
    """The types with the scales of the results; None where a result is a tensor of its own."""
    follow = SCALES.get(step.name)
    scaled = []
    for place, type_ in enumerate(types):
        scale = None
        if follow is not None and type_.kind in _SCALED:
            scale = follow(step, place)
        scaled.append(replace(type_, scale=scale))
    return scaled


def multiplier(step: Step) -> float | None:
    """The number that a product or quotient multiplies its other operand by; None where it is no number."""
    first, second = map(step.number_in, step.args[:2])
    if step.name == "aten.mul":
        return first if second is None else second
    if "rounding_mode" in step.kwargs:
        return None
    if not second:
        return None
    return 1 / second


def weighted(step: Step, type_: SpmdType, weight: float) -> SpmdType:
    """The type of a term that an op multiplies by `weight`, an argument of it such as `alpha`."""
    if type_.kind not in _SCALED or weight == 1:
        return type_
    return replace(type_, scale=type_.multiples.times(weight, step.world))


def weights_of(step: Step) -> tuple[float, float]:
    """What a sum multiplies its two terms by."""
    given = [step.kwargs.get(name, 1) for name in ("beta", "alpha")]
    beta, alpha = (float(value) if isinstance(value, (int, float)) else 1.0 for value in given)
    if step.name == "aten.sub":
        return 1.0, -alpha
    if step.name == "aten.rsub":
        return -alpha, 1.0
    return beta, alpha


def is_times_ranks(step: Step, type_: SpmdType) -> bool:
    """True when the value was multiplied by the number of ranks, as before an average that is to be a sum."""
    factor = type_.multiples.factor
    return factor is not None and is_close(factor.value, step.world)


def _viewed(step: Step, place: int) -> Scale:
    """The same tensor where the view only has other dims in front, as a sum would broadcast it."""
    scale = step.type_at(0).multiples
    shapes = [step.args[0].shape, step.results[place].shape]
    before, after = (list(dropwhile(lambda size: size == 1, shape)) for shape in shapes)
    if before == after or step.name == "aten.expand":
        return scale
    arguments = (*step.args[1:], step.kwargs, place)
    return scale.viewed(f"{step.name}{arguments}")


def _added(step: Step, place: int) -> Scale:
    terms = zip(step.args[:2], weights_of(step), strict=False)
    return total(_scales_of(weighted(step, step.type_in(value), weight) for value, weight in terms))


def _multiplied(step: Step, place: int) -> Scale | None:
    number = multiplier(step)
    if number is None:
        return _product(step, *step.args[:2])
    return total(_scales_of(step.types)).times(number, step.world)


def _scales_of(terms: Iterable[SpmdType]) -> list[Scale]:
    """The scales of the terms that have the kind of their sum: the partial ones, the shards, or the whole ones."""
    types = Types(terms)
    deciding = types.of_kind("P") or types.of_kind("V") or types.of_kind("I", "R")
    return [type_.multiples for type_ in deciding]


def _product_plus(step: Step, place: int) -> Scale:
    """The scale of beta * input + alpha * product."""
    beta, alpha = weights_of(step)
    bias = weighted(step, step.type_at(0), beta)
    plain = _product(step, *step.args[1:3]) or own_scale()
    return total([plain.times(alpha, step.world), *_scales_of([bias])])


def _product(step: Step, left: Any, right: Any) -> Scale | None:
    """The scale of a product or quotient of two tensors; None where neither is multiplied."""
    first = _factor_of(step, left)
    second = _factor_of(step, right)
    is_quotient = step.name in ("aten.div", "aten.true_divide")
    if is_quotient and second is not None:
        second = second.inverse()
    found = product(first, second)
    is_own = found is not None and found.value == 1 and found.gradient in (0, 1)
    if is_own:
        return None
    return own_scale(factor=found)


def _factor_of(step: Step, value: Any) -> Factor | None:
    """The multiple of a factor of a product; None for a number that cannot be read, and for different multiples."""
    if not isinstance(value, Tensor):
        return None
    type_ = step.type_of(value)
    is_number = value.numel() == 1 and not type_.grad
    if is_number:
        return None
    if type_.kind not in _SCALED:
        return Factor(gradient=0.0)
    return type_.multiples.factor


_RULES: dict[Callable[[Step, int], Scale | None], set[str]] = {
    lambda step, place: step.type_at(0, "self").multiples: SAME_VALUE,
    lambda step, place: step.type_at(1).multiples: {"aten.copy"},
    lambda step, place: step.type_at(0).multiples.times(-1, step.world): {"aten.neg"},
    lambda step, place: _product(step, *step.args[:2]): set(LABELS),
    _viewed: VIEWS,
    # Linear in the first operand.
    lambda step, place: step.type_at(0).multiples.anew(): {
        "aten.sum", "aten.mean", "aten.index_select", "aten.embedding", "aten.gather", "aten.cumsum", "aten.flip",
        "aten.roll", "aten.tril", "aten.triu", "aten.native_dropout", "aten.dropout", "aten.repeat",
    },
    _added: SUMS,
    _multiplied: SCALINGS,
    _product_plus: set(PRODUCT_OF),
    # Parts, or branches, of one tensor: a sum of tensors that are zero in the other parts.
    lambda step, place: total([scale.anew() for scale in _scales_of(step.types)]): {*PACKS, "aten.where"},
    # Filled with zeros, as a multiple of the operand; with anything else a tensor of its own.
    lambda step, place: step.type_at(0).multiples.anew() if is_zero(step.arg(2, "value")) else None: {
        "aten.masked_fill",
    },
}  # fmt: skip
SCALES = {name: rule for rule, names in _RULES.items() for name in names}
