"""Values of a wrong run and of its references -> which of them are right: whole, as a part, or as a summand.

A value is right where the reference has an equal one: whole, or the rank's part of it, or the sum or mean over the
ranks. One whose shape has no counterpart in the reference is right where all that its op was given is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from tpcompile.numerics.fingerprints import NUM_SUMS, Fingerprint, Shape
from tpcompile.numerics.op_names import (
    COLLECTIVES,
    IN_SOME_RUNS,
    NO_VALUES,
    PUTS_TOGETHER,
    SAME_VALUES,
    TAKES_APART,
    may_move,
)
from tpcompile.numerics.traced import Trace, Value

LOOKUPS = {"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take_along_dim"}
"""What they return for a rank's own numbers is masked later."""


ROUNDINGS = 8
"""Times the precision of the dtype by which equal values may differ: a run rounds many times, in its own order."""
_MOST = 0.25
"""Largest difference that counts as rounding, in float8 too."""


MOVED = 0.05
"""Relative distance of equal numbers in different orders, at least."""


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
    moments: Fingerprint = ()
    """Norm, sum and maximum of what all ranks have together; empty for single numbers."""


@dataclass(frozen=True)
class Right:
    """A value of the reference, or a rank's part of one."""

    tensor: Fingerprint
    value: Value
    """The whole value."""
    place: int
    """Place of the whole value in its trace."""
    trace: Trace
    rank: int = -1
    """Whose part it is; -1 for the whole."""


@dataclass
class Known:
    """Values of the references, by shape."""

    whole: dict[Shape, list[Right]] = field(default_factory=dict)
    parts: dict[Shape, list[Right]] = field(default_factory=dict)

    comparable: set[Shape] = field(default_factory=set)
    """Shapes of these values and parts that are floats: a float has a counterpart in no index."""
    padded: Collection[int] = ()
    """Lengths of dims of which this rank's last places are padding: what it has there, the reference has nowhere."""
    has_axes: bool = False
    """Parts along other axes of the mesh are among those of each rank."""
    _rows: dict[tuple[Shape, int], Tensor] = field(default_factory=dict)
    _moments: dict[Shape, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, traces: Iterable[Trace], *, padded: Collection[int] = (), has_axes: bool = False) -> Known:
        """All values of these traces."""
        known = cls(padded=padded, has_axes=has_axes)
        for trace in traces:
            for place, value in enumerate(trace.values):
                if value.name in NO_VALUES:
                    continue  # whatever was there before: near to anything where it is large
                if value.tensor is not None:
                    whole = Right(value.tensor, value, place, trace)
                    known.whole.setdefault(value.shape, []).append(whole)
                if value.is_float:
                    known.comparable |= {value.shape, *(part.shape for part in value.parts)}
                for part in value.parts:
                    right = Right(part.tensor, value, place, trace, part.rank)
                    known.parts.setdefault(part.shape, []).append(right)
        return known

    def is_among(self, numbers: Fingerprint, shape: Shape, rank: int, tolerance: float) -> bool:
        """True where some whole value (-1), or some part of that rank, is near."""
        rows = self._rows_of(shape, rank)
        wanted = torch.tensor(numbers, dtype=torch.float64)
        apart = (rows - wanted).square().sum(1)
        return bool((apart <= tolerance**2 * rows.square().sum(1)).any())

    def in_other_order(self, value: Value, tolerance: float) -> Right | None:
        """The whole value that has its numbers in a different order; None for none.

        Norm, sum and maximum are near those of a value that is wrong by little, too: its numbers are near as well.
        """
        shape, wholes = value.shape, self.whole.get(value.shape, [])
        if len(value.moments) < 2 or not wholes or value.tensor is None:
            return None
        if shape not in self._moments:
            known = [right.value.moments for right in wholes]
            self._moments[shape] = torch.tensor(known, dtype=torch.float64)
        wanted = self._moments[shape]
        apart = (wanted - torch.tensor(value.moments, dtype=torch.float64)).square().sum(1)
        near = (apart <= tolerance**2 * wanted.square().sum(1)).nonzero().flatten().tolist()
        numbers = value.tensor
        return next((wholes[at] for at in near if not is_near(numbers, wholes[at].tensor, MOVED)), None)

    def together_in_order(self, value: Value, total: Total | None, rank: int, tolerance: float) -> Right | None:
        """The value of which the ranks together have all numbers, each not those of its part; None for none."""
        numbers = value.tensor
        if total is None or not total.moments or numbers is None:
            return None
        of_rank = (right for right in self.parts.get(value.shape, []) if right.rank == rank)
        alike = (right for right in of_rank if is_near(total.moments, right.value.moments, tolerance))
        return next((right for right in alike if not is_near(numbers, right.tensor, MOVED)), None)

    def is_unlike_own(self, value: Value, values: Sequence[Value], rank: int, tolerance: float) -> bool:
        """True where the same op on the same line was given the same, or of it this rank's part, and made another."""
        for right in self.with_shape(value.shape):
            other = right.value
            is_same_op = right.rank in (-1, rank) and (other.name, other.line) == (value.name, value.line)
            if not is_same_op or (other.numbers, len(other.sources)) != (value.numbers, len(value.sources)):
                continue
            pairs = zip(value.sources, other.sources, strict=True)
            if all(_has(right.trace.values[theirs], values[own], rank, tolerance) for own, theirs in pairs):
                return True
        return False

    def given_as(self, value: Value) -> list[Right]:
        """What the references were given by the name of a tensor of which it may be a part."""
        return [
            right
            for right in self.parts.get(value.shape, [])
            if right.value.is_given and right.value.name == value.name
        ]

    def _rows_of(self, shape: Shape, rank: int) -> Tensor:
        """[values, sums], made at the first question: a deep model has thousands of values of one shape."""
        if (shape, rank) not in self._rows:
            among = self.whole if rank < 0 else self.parts
            numbers = [right.tensor for right in among.get(shape, []) if right.rank == rank]
            self._rows[shape, rank] = torch.tensor(numbers, dtype=torch.float64).view(-1, NUM_SUMS)
        return self._rows[shape, rank]

    def with_shape(self, shape: Shape) -> Iterator[Right]:
        """Whole values of this shape, then parts."""
        yield from self.whole.get(shape, [])
        yield from self.parts.get(shape, [])


def as_text(trace: Trace) -> str:
    """What the other ranks need of a trace: `sums_over_ranks` reads it."""
    return json.dumps([[value.name, value.shape, value.tensor, value.moments] for value in trace.values])


def _is_places(value: Value) -> bool:
    return value.is_given and not value.is_float


def sums_over_ranks(texts: Sequence[str], *, rank: int = 0) -> list[Total | None]:
    """The totals over all ranks of each value of one; None for copies, empty where ranks did not run the same ops."""
    ranks = list(map(json.loads, texts))
    found: list[Total | None] = [None] * len(ranks[rank])
    kept = [kept_places([name for name, *_ in values]) for values in ranks]
    ops = [[ranks[number][place][:2] for place in places] for number, places in enumerate(kept)]
    if ops.count(ops[0]) < len(ops):
        return []
    for places in zip(*kept, strict=True):
        numbers = [values[place][2] for values, place in zip(ranks, places, strict=True)]
        if None not in numbers:
            moments = [values[place][3] for values, place in zip(ranks, places, strict=True)]
            found[places[rank]] = _total(numbers, moments)
    return found


def kept_places(names: Sequence[str]) -> list[int]:
    """Places of the ops that are the same ones on all ranks of a program, in their order."""
    return [place for place, name in enumerate(names) if name not in IN_SOME_RUNS]


def _total(numbers: Sequence[Fingerprint], moments: Sequence[Fingerprint]) -> Total:
    sums = tuple(map(sum, zip(*numbers, strict=True)))
    norm = math.hypot(*(fingerprint[0] for fingerprint in numbers))
    together: Fingerprint = ()
    if all(len(each) > 1 for each in moments):
        norms, totals, largest = zip(*moments, strict=True)
        together = (math.hypot(*norms), sum(totals), max(largest))
    return Total(sums, norm, together)


def all_judged(
    values: Sequence[Value],
    known: Known,
    sums: Sequence[Total | None],
    *,
    tolerance: float,
    rank: int,
    size: int,
    right: Collection[str] = (),
    of_right: Collection[int] = (),
) -> list[Judged]:
    """How each value of this rank of `size` is right, in their order.

    `right` names parameters that are; `of_right` are places of what right results were made of: the reference need not
    have an equal one.
    """
    found: list[Judged] = []
    looked_up: set[int] = set()
    uses = _uses(values)
    own_order: set[int] = set()
    for place, value in enumerate(values):
        if _is_looked_up(value, looked_up):
            looked_up.add(place)
        same = [source for source in value.sources if _is_same(value, values[source])]
        total = sums[place] if sums else None
        judged = found[same[0]] if same else None
        if not same:
            allowed = allowed_for(value, tolerance)
            judged = _judged_alone(value, known, total, tolerance=allowed, rank=rank, size=size)
            if judged == Judged.WRONG and (
                place in looked_up
                or _is_right_view(value, values, found)
                or _is_of_others(place, values, uses, found, known, tolerance=allowed, rank=rank)
            ):
                judged = None
            is_view = value.name in SAME_VALUES and not own_order.isdisjoint(value.sources)
            may_be_own = judged == Judged.WRONG and (is_view or _is_brought(value) or not may_move(value.name))
            if may_be_own and _is_in_own_order(value, total, known, tolerance=allowed, rank=rank):
                judged = None
                own_order |= set() if _is_brought(value) else {place}
            is_place = not value.is_float and not value.is_given and value.tensor is not None
            if judged is None and is_place and known.is_unlike_own(value, values, rank, allowed):
                counted = total and _as_summand(total, value.shape, known, tolerance=allowed, rank=rank, size=size)
                judged = counted or Judged.WRONG
        is_given_right = value.is_given and value.name in right
        if judged == Judged.WRONG and (is_given_right or place in of_right):
            judged = Judged.PART  # in a layout whose shape the reference has for something else
        found.append(judged or _as_made([found[source] for source in value.sources]))
    return found


def allowed_for(value: Value, tolerance: float) -> float:
    """How far the value may be from a right one; `tolerance` where it was made in no coarser dtype than the weights."""
    return max(tolerance, min(ROUNDINGS * value.unit, _MOST))


def _is_same(value: Value, source: Value) -> bool:
    """True for a copy."""
    return value.tensor is not None and (value.shape, value.tensor) == (source.shape, source.tensor)


def _as_made(sources: Sequence[Judged]) -> Judged:
    """How a value is right that the reference has nothing to compare with: as what it was made of."""
    if Judged.WRONG in sources:
        return Judged.WRONG
    summands = [judged for judged in sources if judged.is_summand]
    return summands[0] if summands else Judged.PART


def _judged_alone(
    value: Value, known: Known, total: Total | None, *, tolerance: float, rank: int, size: int
) -> Judged | None:
    """How the value is right by its numbers; None where the reference has nothing to compare it with."""
    shape = value.shape
    has_counterpart = shape in known.comparable if value.is_float else shape in known.whole or shape in known.parts
    if value.tensor is None or not has_counterpart or value.name in NO_VALUES:
        return None
    if known.is_among(value.tensor, shape, -1, tolerance):
        return Judged.WHOLE
    if known.is_among(value.tensor, shape, rank, tolerance):
        return Judged.PART
    if total is not None and size > 1 and value.is_float:  # masks of the ranks add up to one of ones
        summand = _as_summand(total, shape, known, tolerance=tolerance, rank=rank, size=size)
        if summand is not None:
            return summand
    is_padded = any(length in known.padded for length in (shape[:1] + shape[-1:]))
    is_wrong = value.is_float or _are_other_places(value, known, total, tolerance)
    return Judged.WRONG if is_wrong and not is_padded else None


def _uses(values: Sequence[Value]) -> dict[int, list[int]]:
    """Place -> the places of what was made of the value there."""
    found: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        for source in set(value.sources):
            found.setdefault(source, []).append(place)
    return found


def _is_of_others(
    place: int, values: Sequence[Value], uses: Mapping[int, Sequence[int]], judged: Sequence[Judged], known: Known,
    *, tolerance: float, rank: int,
) -> bool:  # fmt: skip
    """True for the part of a different rank that came through a collective, or is put together to be sent in one."""
    value = values[place]
    parts = known.parts.get(value.shape, []) if value.tensor else []
    if not any(is_near(value.tensor or (), right.tensor, tolerance) for right in parts):
        return False
    if value.name.startswith(COLLECTIVES):
        return True
    is_piece = value.name in TAKES_APART and all(judged[source] == Judged.WHOLE for source in value.sources)
    return is_piece and _is_only_sent(place, values, uses)


def _is_only_sent(place: int, values: Sequence[Value], uses: Mapping[int, Sequence[int]]) -> bool:
    """True where nothing but collectives is given a value, its views, and what they are put together in."""
    users = [(user, values[user].name) for user in uses.get(place, ())]
    return bool(users) and all(
        name.startswith(COLLECTIVES) or (name in SAME_VALUES | PUTS_TOGETHER and _is_only_sent(user, values, uses))
        for user, name in users
    )


def _is_brought(value: Value) -> bool:
    """True for what a collective brought."""
    return value.name.startswith(COLLECTIVES)


def _is_in_own_order(value: Value, total: Total | None, known: Known, *, tolerance: float, rank: int) -> bool:
    """True for numbers of the forward pass in another order, for what no op that moves them on its rank has made.

    A program may have an order of its own: it spread its tokens so, or a collective brought them so, and what it makes
    of them restores that of the reference.
    """
    if value.in_backward:
        return False
    found = known.in_other_order(value, tolerance) or known.together_in_order(value, total, rank, tolerance)
    return found is not None


def _is_right_view(value: Value, values: Sequence[Value], judged: Sequence[Judged]) -> bool:
    """True for a right part as one row of numbers, of which no equal part of the whole row need be."""
    if value.name not in SAME_VALUES or len(value.shape) != 1 or len(value.sources) != 1:
        return False
    source = value.sources[0]
    return len(values[source].shape) > 1 and judged[source] == Judged.PART


def _has(whole: Value, own: Value, rank: int, tolerance: float) -> bool:
    """True where the value is the whole one, or this rank's part of it."""
    parts = [part.tensor for part in whole.parts if (part.rank, part.shape) == (rank, own.shape)]
    wholes = [whole.tensor] if whole.tensor is not None and whole.shape == own.shape else []
    return own.tensor is not None and any(is_near(own.tensor, each, tolerance) for each in wholes + parts)


def _is_looked_up(value: Value, looked_up: set[int]) -> bool:
    """True for what a look-up of a forward pass returned, and for views of it."""
    is_view = value.name in SAME_VALUES and not looked_up.isdisjoint(value.sources)
    return (value.name in LOOKUPS or is_view) and not value.in_backward


def _are_other_places(value: Value, known: Known, total: Total | None, tolerance: float) -> bool:
    """True for a part of places that the reference was given by this name, where those of all ranks are not all."""
    wholes = known.given_as(value) if _is_places(value) else []
    if not wholes or total is None or not total.moments:
        return False
    return not any(is_near(total.moments, right.value.moments, tolerance) for right in wholes)


def _as_summand(total: Total, shape: Shape, known: Known, *, tolerance: float, rank: int, size: int) -> Judged | None:
    """How a value is right together with those of the other ranks; None where it is not."""
    if any(known.is_among(total.sum, shape, of, tolerance) for of in ((-1, rank) if known.has_axes else (-1,))):
        return Judged.PARTIAL
    if known.is_among(times(total.sum, 1 / size), shape, -1, tolerance):
        return Judged.AVERAGED
    numbers = known.whole.get(shape, []) if math.prod(shape) == 1 else []
    if any(_is_norm(total, right, tolerance) for right in numbers):
        return Judged.NORM
    return None


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


def all_behind(places: Iterable[int], values: Sequence[Value]) -> set[int]:
    """The places, and all that they were made from."""
    return behind(places, values, [Judged.WHOLE] * len(values), {Judged.WHOLE})


def of_gradients(values: Sequence[Value]) -> set[int]:
    """The places of gradients, and of what was made of them: a norm, a weight after a step."""
    found: set[int] = set()
    for place, value in enumerate(values):
        if value.in_backward or not found.isdisjoint(value.sources):
            found.add(place)
    return found


def times(numbers: Fingerprint, factor: float) -> Fingerprint:
    """The fingerprint of a multiple."""
    return tuple(number * factor for number in numbers)


def is_near(numbers: Fingerprint, wanted: Fingerprint, tolerance: float) -> bool:
    """True where they are equal up to the tolerance, relative to the norm of `wanted`."""
    # A square of 1e200, which a gradient that has run away has, is no float.
    apart = math.dist(numbers, wanted)
    return math.isfinite(apart) and apart <= tolerance * math.hypot(*wanted)


def multiple_of(numbers: Fingerprint, wanted: Fingerprint) -> float:
    """The number of times `wanted` that is nearest; 0 where there is none, as of zeros."""
    norm = math.hypot(*wanted)
    if not (norm and math.isfinite(norm)):
        return 0.0
    ratio = sum(one * (other / norm) for one, other in zip(numbers, wanted, strict=True)) / norm
    return ratio if math.isfinite(ratio) else 0.0


def _is_norm(total: Total, right: Right, tolerance: float) -> bool:
    return math.isclose(total.norm, abs(right.tensor[0]), rel_tol=tolerance)
