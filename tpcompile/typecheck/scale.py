"""A value as a sum of multiples of replicated tensors: how many times each is in it, and how much gradient it gets.

`b / size` on every rank is a summand: the ranks' sum has b once, and b's gradient is 1 / size of the right one.
`b + (b / size - b).detach()` has the same value and b's whole gradient. So value and gradient are counted apart,
through sums, numbers and `detach`, for every replicated tensor that a result is a multiple of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

_serials = count()
_MOST_TERMS = 8
"""A stream of residuals has a term for every block; longer sums are one tensor."""


class Base(NamedTuple):
    """A replicated tensor, or a view of one."""

    serial: int
    name: str = ""
    """Name of the parameter, empty for other tensors."""
    views: tuple[str, ...] = ()
    """The views that made it of the tensor."""


class Factor(NamedTuple):
    """Multiple of one tensor in a sum."""

    plain: float = 1.0
    shared: float = 0.0
    """The part of the multiple that was divided by the number of ranks."""
    gradient: float = 1.0
    """Multiple of the result's gradient that the tensor gets; 0 where none flows, NaN behind a hook of the user's."""

    @property
    def value(self) -> float:
        """The whole multiple."""
        return self.plain + self.shared

    @property
    def is_shared(self) -> bool:
        """True when all of it was divided by the number of ranks."""
        return self.shared != 0 and is_close(self.plain, 0)

    def times(self, number: float, world: int) -> Factor:
        """The multiple after a product with a number; divided twice by the number of ranks, it is no share."""
        value = self.value * number
        gradient = self.gradient * number
        is_divided = is_close(abs(number) * world, 1)
        if not is_divided:
            return Factor(self.plain * number, self.shared * number, gradient)
        if self.is_shared:
            return Factor(value, 0.0, gradient)
        return Factor(0.0, value, gradient)

    def inverse(self) -> Factor | None:
        """The multiple of the reciprocal; None for that of zero."""
        if self.value == 0:
            return None
        return Factor(1 / self.value, 0.0, self.gradient / self.value**2)


ITSELF = Factor()


def product(left: Factor | None, right: Factor | None) -> Factor | None:
    """The multiple of a product of two tensors; None where the two get different multiples of its gradient."""
    if left is None or right is None:
        return None
    of_left = left.gradient * right.value
    of_right = right.gradient * left.value
    gradient = _only({of_left, of_right})
    if gradient is None:
        return None
    value = left.value * right.value
    if left.is_shared or right.is_shared:
        return Factor(0.0, value, gradient)
    return Factor(value, 0.0, gradient)


def _only(gradients: set[float]) -> float | None:
    """The one multiple, but for those of tensors without a gradient; None for several."""
    found = {round(gradient, 6) for gradient in gradients}
    found.discard(0.0)
    if len(found) > 1:
        return None
    if not found:
        return 0.0
    return found.pop()


@dataclass(frozen=True)
class Scale:
    """A value as a sum of multiples; without terms it is a multiple of nothing that is known."""

    terms: dict[Base, Factor] = field(default_factory=dict)

    @property
    def factor(self) -> Factor | None:
        """The multiple, where it is the same of all tensors, but for those without a gradient; None otherwise."""
        factors = self.terms.values()
        values = {(round(factor.plain, 6), round(factor.shared, 6)) for factor in factors}
        gradient = _only({factor.gradient for factor in factors})
        if gradient is None or len(values) != 1:
            return None
        [(plain, shared)] = values
        return Factor(plain, shared, gradient)

    def times(self, number: float, world: int) -> Scale:
        """The scale after a product with a number."""
        return Scale({base: factor.times(number, world) for base, factor in self.terms.items()})

    def plus(self, other: Scale) -> Scale:
        """The scale of a sum."""
        if UNKNOWN_SCALE in (self, other):
            return UNKNOWN_SCALE
        found = dict(self.terms)
        for base, (plain, shared, gradient) in other.terms.items():
            known = found.get(base, Factor(0.0, 0.0, 0.0))
            found[base] = Factor(known.plain + plain, known.shared + shared, known.gradient + gradient)
        for base, factor in list(found.items()):
            is_gone = is_close(factor.value, 0) and is_close(factor.gradient, 0)
            if is_gone:
                del found[base]
        if len(found) > _MOST_TERMS:
            return own_scale(factor=Scale(found).factor)
        return Scale(found)

    def with_gradient(self, gradient: float) -> Scale:
        """The scale of the same value, of which every tensor gets this multiple of the gradient."""
        return Scale({base: factor._replace(gradient=gradient) for base, factor in self.terms.items()})

    def anew(self) -> Scale:
        """The scale of what is linear in the value: of as many tensors, which are new ones."""
        return Scale({Base(next(_serials)): factor for factor in self.terms.values()})

    def viewed(self, view: str) -> Scale:
        """The scale of a view, which is the same tensor as that of an equal view."""
        return Scale({base._replace(views=(*base.views, view)): factor for base, factor in self.terms.items()})


UNKNOWN_SCALE = Scale()


def own_scale(name: str = "", factor: Factor | None = ITSELF) -> Scale:
    """The scale of a multiple of a new tensor, by itself once; `name` of a parameter. Unknown without a multiple."""
    if factor is None:
        return UNKNOWN_SCALE
    return Scale({Base(next(_serials), name): factor})


def total(scales: Sequence[Scale]) -> Scale:
    """The scale of a sum; unknown without terms."""
    return functools.reduce(Scale.plus, scales) if scales else UNKNOWN_SCALE


def is_close(left: float, right: float) -> bool:
    """Equal but for the rounding of a few float32 operations."""
    return math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-7)
