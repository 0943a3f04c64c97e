"""What the references have, by shape, line and numbers; the ways in which a value is right.

A value is right where the reference has an equal one: whole, or the rank's part of it, or the sum or mean over the
ranks. One whose shape has no counterpart in the reference is right where all that its op was given is right.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from tpcompile.evidence.records import UserLine
from tpcompile.numerics.fingerprints import NUM_SUMS, Fingerprint, Shape
from tpcompile.numerics.op_names import IN_SOME_RUNS, NO_VALUES
from tpcompile.numerics.trace import Trace, Value

LOOKUPS = {"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take_along_dim"}
"""What they return for a rank's own numbers is masked later."""


ROUNDINGS = 8
"""Times the precision of the dtype by which equal values may differ: a run rounds many times, in its own order."""
_MOST = 0.25
"""Largest difference that counts as rounding, in float8 too."""


MOVED = 0.05
"""Relative distance of equal numbers in different orders, at least."""


OpAtLine = tuple[str, UserLine | None, bool]
"""An op, its line, and whether it runs in a backward pass."""


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
    elsewhere: tuple[tuple[Fingerprint, int], ...] = ()
    """Sums over the ranks of other axes of the mesh, and of several, each with the number of those ranks."""


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
    axes: Sequence[int] = ()
    """Ranks along each other axis of the mesh, whose parts are among those of each rank."""
    counts: dict[OpAtLine, set[int]] = field(default_factory=dict)
    """How many times each trace that runs an op on a line runs it."""
    lines: set[UserLine] = field(default_factory=set)
    """Those on which the reference runs an op, and those that call them."""
    _rows: dict[tuple[Shape, int], Tensor] = field(default_factory=dict)
    _moments: dict[Shape, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traces: Iterable[Trace],
        *,
        twin: Trace | None = None,
        padded: Collection[int] = (),
        axes: Sequence[int] = (),
    ) -> Known:
        """All values of these traces, and of the program as it is for one rank."""
        traces = list(traces)
        known = cls(padded=padded, axes=axes)
        ran = (value for trace in traces for value in trace.values if value.line is not None)
        known.lines = {line for value in ran for line in (value.line, *value.callers) if line is not None}
        traces += [] if twin is None else [twin]
        for trace in traces:
            for op, count in counted(trace.values).items():
                known.counts.setdefault(op, set()).add(count)
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

    def has(self, value: Value, rank: int, tolerance: float) -> bool:
        """True where the references have it, or have it as the rank's part of a value."""
        numbers = value.tensor
        return numbers is not None and any(self.is_among(numbers, value.shape, of, tolerance) for of in (-1, rank))

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

    def in_other_shape(self, value: Value, tolerance: float) -> Right | None:
        """The whole value that has its numbers in another shape; None for none."""
        size = math.prod(value.shape)
        wholes = (right for shape, each in self.whole.items() if math.prod(shape) == size for right in each)
        is_known = len(value.moments) > 1
        return next((one for one in wholes if is_known and is_near(value.moments, one.value.moments, tolerance)), None)

    def reordered(self, value: Value, total: Total | None, rank: int, tolerance: float) -> Right | None:
        """The value that has its numbers in a different order, or those of all ranks together; None for none."""
        found, numbers = self.in_other_order(value, tolerance), value.tensor
        if found is not None:
            return found
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
            if all(has(right.trace.values[theirs], values[own], rank, tolerance) for own, theirs in pairs):
                return True
        return False

    def is_made_otherwise(self, value: Value, rank: int, tolerance: float) -> bool:
        """True where the same op on the same line made others than this value, each time."""
        made = [
            right.tensor
            for right in self.with_shape(value.shape)
            if right.rank in (-1, rank) and (right.value.name, right.value.line) == (value.name, value.line)
        ]
        return bool(made) and not any(is_near(value.tensor or (), numbers, tolerance) for numbers in made)

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


def op_at_line(value: Value) -> OpAtLine:
    """What the results of one op in a loop share."""
    return value.name, value.line, value.in_backward


def counted(values: Sequence[Value]) -> Counter[OpAtLine]:
    """How often each op on a line runs: pieces of one tensor are results of one op."""
    before = [None, *values]
    return Counter(
        op_at_line(value)
        for value, last in zip(values, before, strict=False)
        if not value.is_given
        and (last is None or (op_at_line(last), last.sources) != (op_at_line(value), value.sources))
    )


def as_text(trace: Trace) -> str:
    """What the other ranks need of a trace: `sums_over_ranks` reads it."""
    return json.dumps([[value.name, value.shape, value.tensor, value.moments] for value in trace.values])


def totals_as_text(trace: Trace, totals: Sequence[Total | None]) -> str:
    """The same of sums, which are summed along another axis; of no sums where ranks did not run the same ops."""
    pairs = zip(trace.values, totals, strict=bool(totals))
    return json.dumps([[value.name, value.shape, total and total.sum, ()] for value, total in pairs])


def is_place(value: Value) -> bool:
    """True for places, such as rows of a table, that the run was given."""
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


def allowed_for(value: Value, tolerance: float) -> float:
    """How far the value may be from a right one; `tolerance` where it was made in no coarser dtype than the weights."""
    return max(tolerance, min(ROUNDINGS * value.unit, _MOST))


def has(whole: Value, own: Value, rank: int, tolerance: float) -> bool:
    """True where the value is the whole one, or this rank's part of it."""
    parts = [part.tensor for part in whole.parts if (part.rank, part.shape) == (rank, own.shape)]
    wholes = [whole.tensor] if whole.tensor is not None and whole.shape == own.shape else []
    return own.tensor is not None and any(is_near(own.tensor, each, tolerance) for each in wholes + parts)


def own_use(
    place: int, values: Sequence[Value], sums: Sequence[Total | None], *, size: int, tolerance: float
) -> int | None:
    """The first op that uses what a rank was given without anything of which each rank was given its own.

    Places that begin at 0 on every rank are right beside the rank's first place.
    """

    def is_of_rank(given: int) -> bool:
        total, numbers = sums[given] if sums else None, values[given].tensor
        if total is None or numbers is None or not values[given].is_given:
            return False
        return not is_near(total.sum, times(numbers, size), tolerance)

    for at in range(place + 1, len(values)):
        sources = values[at].sources
        if place in sources and values[at].line is not None:
            beside = all_behind((source for source in sources if source != place), values)
            if not any(map(is_of_rank, beside)):
                return at
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
