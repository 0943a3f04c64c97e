"""Values of a wrong run and of its references -> which of them are right: whole, as a part, or as a summand.

A value is right where the reference has an equal one: whole, or the rank's part of it, or the sum or mean over the
ranks. One whose shape has no counterpart in the reference is right where all that its op was given is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from tpcompile.numerics.traced import Fingerprint, Shape, Trace, Value

_LOOKUPS = {"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take_along_dim"}
"""What they return for a rank's own numbers is masked later."""


class Judged(Enum):
    """How a value of a rank is right."""

    WHOLE = auto()
    """Equal to a value of the reference."""
    PART = auto()
    """Equal to the rank's part of one; or without a counterpart, and made of nothing wrong."""
    PARTIAL = auto()
    """Right as the sum over the ranks."""
    AVERAGED = auto()
    """Right as the mean over the ranks."""
    NORM = auto()
    """One number whose squares are right as their sum over the ranks: the norm of a shard."""
    WRONG = auto()

    @property
    def is_summand(self) -> bool:
        """Right only together with the values of the other ranks."""
        return self in SUMMANDS


SUMMANDS = (Judged.PARTIAL, Judged.AVERAGED, Judged.NORM)


class Total(NamedTuple):
    """One value over all ranks."""

    sum: Fingerprint
    norm: float
    """Root of the sum of the squares of the first number of each fingerprint."""


@dataclass(frozen=True)
class Right:
    """A value of the reference, or a rank's part of one."""

    tensor: Fingerprint
    value: Value
    """The whole value."""
    rank: int = -1
    """Whose part it is; -1 for the whole."""


@dataclass
class Known:
    """Values of the references, by shape."""

    whole: dict[Shape, list[Right]] = field(default_factory=dict)
    parts: dict[Shape, list[Right]] = field(default_factory=dict)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> Known:
        """All values of these traces."""
        known = cls()
        values: list[Value] = []
        for trace in traces:
            values += trace.values
        for value in values:
            if value.tensor is not None:
                known.whole.setdefault(value.shape, []).append(Right(value.tensor, value))
            for part in value.parts:
                known.parts.setdefault(part.shape, []).append(Right(part.tensor, value, part.rank))
        return known

    def with_shape(self, shape: Shape) -> Iterator[Right]:
        """Whole values of this shape, then parts."""
        yield from self.whole.get(shape, [])
        yield from self.parts.get(shape, [])

    def find(self, numbers: Fingerprint, shape: Shape, tolerance: float) -> Right | None:
        """The first value or part that is equal to these numbers up to the tolerance, relative to its norm."""
        for right in self.with_shape(shape):
            if is_near(numbers, right.tensor, tolerance):
                return right
        return None


def as_text(trace: Trace) -> str:
    """What the other ranks need of a trace: `sums_over_ranks` reads it."""
    return json.dumps([[value.name, value.shape, value.tensor] for value in trace.values])


def sums_over_ranks(texts: Sequence[str]) -> list[Total | None]:
    """The totals over all ranks, value by value; empty where ranks did not run the same ops."""
    ranks = list(map(json.loads, texts))
    ops = [[(name, shape) for name, shape, _ in values] for values in ranks]
    if ops.count(ops[0]) < len(ops):
        return []
    found: list[Total | None] = []
    for values in zip(*ranks, strict=True):
        numbers = [fingerprint for _, _, fingerprint in values]
        is_known = None not in numbers
        found.append(_total(numbers) if is_known else None)
    return found


def _total(numbers: Sequence[Fingerprint]) -> Total:
    sums = tuple(map(sum, zip(*numbers, strict=True)))
    return Total(sums, math.hypot(*(fingerprint[0] for fingerprint in numbers)))


def all_judged(
    values: Sequence[Value], known: Known, sums: Sequence[Total | None], *, tolerance: float, rank: int, size: int
) -> list[Judged]:
    """How each value of this rank of `size` is right, in their order."""
    found: list[Judged] = []
    for place, value in enumerate(values):
        total = sums[place] if sums else None
        judged = _judged_alone(value, known, total, tolerance=tolerance, rank=rank, size=size)
        sources = [found[source] for source in value.sources]
        if judged is None:  # it is judged as what it was made of
            judged = Judged.WRONG if Judged.WRONG in sources else Judged.PART
        found.append(judged)
    return found


def _judged_alone(
    value: Value, known: Known, total: Total | None, *, tolerance: float, rank: int, size: int
) -> Judged | None:
    """How the value is right by its numbers; None where the reference has nothing to compare it with."""
    whole = known.whole.get(value.shape, [])
    parts = [part for part in known.parts.get(value.shape, []) if part.rank == rank]
    has_counterpart = bool(whole or parts)
    if value.tensor is None or not has_counterpart:
        return None
    if _is_among(value.tensor, whole, tolerance):
        return Judged.WHOLE
    if _is_among(value.tensor, parts, tolerance):
        return Judged.PART
    if total is not None and size > 1:
        if _is_among(total.sum, whole, tolerance):
            return Judged.PARTIAL
        if _is_among(times(total.sum, 1 / size), whole, tolerance):
            return Judged.AVERAGED
        if math.prod(value.shape) == 1 and any(_is_norm(total, right, tolerance) for right in whole):
            return Judged.NORM
    is_own_number = not value.is_float or (value.name in _LOOKUPS and not value.in_backward)
    return None if is_own_number else Judged.WRONG


def behind(places: Iterable[int], values: Sequence[Value], judged: Sequence[Judged], wanted: set[Judged]) -> set[int]:
    """The places that are judged so, and all that are so judged of what they were made from."""
    found: set[int] = set()
    left = list(places)
    while left:
        place = left.pop()
        if judged[place] in wanted and place not in found:
            found.add(place)
            left += values[place].sources
    return found


def times(numbers: Fingerprint, factor: float) -> Fingerprint:
    """The fingerprint of a multiple."""
    return tuple(number * factor for number in numbers)


def is_near(numbers: Fingerprint, wanted: Fingerprint, tolerance: float) -> bool:
    """True where they are equal up to the tolerance, relative to the norm of `wanted`."""
    apart = sum((one - other) ** 2 for one, other in zip(numbers, wanted, strict=True))
    return apart <= tolerance**2 * sum(number**2 for number in wanted)


def _is_norm(total: Total, right: Right, tolerance: float) -> bool:
    return math.isclose(total.norm, abs(right.tensor[0]), rel_tol=tolerance)


def _is_among(numbers: Fingerprint, candidates: Iterable[Right], tolerance: float) -> bool:
    return any(is_near(numbers, right.tensor, tolerance) for right in candidates)
