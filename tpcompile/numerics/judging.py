"""The values of a run, one after the other -> how each is right: by its numbers, or else as what it was made of.

That the reference has no equal makes a value wrong, with exceptions that hold for any program: what was looked up is
masked later, what is sent belongs to a different rank, tokens may be spread in an order of the program's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tpcompile.numerics.fingerprints import Fingerprint, Shape
from tpcompile.numerics.judged import (
    LOOKUPS,
    Judged,
    Known,
    Total,
    all_behind,
    allowed_for,
    counted,
    is_near,
    is_place,
    op_at_line,
    own_use,
    times,
)
from tpcompile.numerics.judged_run import Evidence
from tpcompile.numerics.op_names import (
    ALL_PIECES,
    COLLECTIVES,
    MASKS,
    NO_VALUES,
    PUTS_TOGETHER,
    SAME_VALUES,
    SUMS_OVER_RANKS,
    TAKES_APART,
    may_move,
)
from tpcompile.numerics.trace import Value


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
) -> Evidence:
    """How each value of this rank of `size` is right, in their order.

    `right` names parameters that are; `of_right` are places of what right results were made of: the reference need not
    have an equal one.
    """
    run = _Run(values, known, sums, tolerance=tolerance, rank=rank, size=size)
    for place, value in enumerate(values):
        judged = run.judged_by_numbers(place)
        is_given_right = value.is_given and value.name in right
        if judged == Judged.WRONG and (is_given_right or place in of_right):
            judged = Judged.PART  # in a layout whose shape the reference has for something else
        run.judged.append(judged or _as_made([run.judged[source] for source in value.sources]))
    return Evidence(
        values, run.judged, known, sums, tolerance=tolerance, rank=rank, size=size,
        own_order=run.own_order, of_part=run.of_part,
    )  # fmt: skip


@dataclass
class _Run:
    """A run that is judged from its first value on."""

    values: Sequence[Value]
    known: Known
    sums: Sequence[Total | None]
    tolerance: float
    rank: int
    size: int
    judged: list[Judged] = field(default_factory=list)
    uses: dict[int, list[int]] = field(default_factory=dict)
    """Place -> the places of what was made of the value there."""
    looked_up: set[int] = field(default_factory=set)
    """Places of what look-ups of the forward pass returned, and of views of it."""
    wrongly_masked: set[int] = field(default_factory=set)
    """Places of what wrong masks made, and of views of it."""
    mean_over: int = 0
    """Ranks of another axis of the mesh of whose own means the mean is taken; 1 for none, 0 where it is not known."""
    own_order: set[int] = field(default_factory=set)
    """Places of what the program holds in an order of its own."""
    brought: set[int] = field(default_factory=set)
    """Places of what collectives brought, and of views and pieces of it."""
    in_own_loop: set[int] = field(default_factory=set)
    """Places of what a loop makes that runs another number of times on one rank, and of all of it put together."""
    of_part: set[int] = field(default_factory=set)
    """Places of what a loop over this rank's part made: on one rank it runs more often."""
    of_others: set[int] = field(default_factory=set)
    """Places of what other ranks have, which collectives brought, and of what is made of it."""

    def __post_init__(self) -> None:
        for place, value in enumerate(self.values):
            for source in set(value.sources):
                self.uses.setdefault(source, []).append(place)
        self.counts = counted(self.values)
        self.last = {op_at_line(value): place for place, value in enumerate(self.values)}

    def judged_by_numbers(self, place: int) -> Judged | None:
        """How the next value is right; None where the reference has nothing to compare it with."""
        value = self.values[place]
        self._follow(place)
        is_view = value.name in SAME_VALUES and not self.looked_up.isdisjoint(value.sources)
        if (value.name in LOOKUPS or is_view) and not value.in_backward:
            self.looked_up.add(place)
        allowed = allowed_for(value, self.tolerance)
        if self._is_masked_by_wrong(place, allowed):
            return Judged.WRONG
        numbers = value.shape, value.tensor
        same = [at for at in value.sources if (self.values[at].shape, self.values[at].tensor) == numbers]
        if same and value.tensor is not None:  # a copy
            return self.judged[same[0]]
        total = self.sums[place] if self.sums else None
        found = self._beside_reference(place, total, allowed)
        if found == Judged.WRONG and self._is_none_that_is_wrong(place, total, allowed):
            found = None
        is_made_place = not (value.is_float or value.is_given) and value.tensor is not None
        is_made_place = is_made_place and place not in self.in_own_loop
        if found is None and is_made_place and self.known.is_unlike_own(value, self.values, self.rank, allowed):
            return (total and self._as_summand(total, value, allowed)) or Judged.WRONG
        return found

    def _beside_reference(self, place: int, total: Total | None, tolerance: float) -> Judged | None:
        value, known = self.values[place], self.known
        shape = value.shape
        has_counterpart = shape in known.comparable if value.is_float else shape in known.whole or shape in known.parts
        if value.tensor is None or not has_counterpart or value.name in NO_VALUES:
            return None
        if known.is_among(value.tensor, shape, -1, tolerance):
            return Judged.WHOLE
        if known.is_among(value.tensor, shape, self.rank, tolerance):
            is_made_of_part = any(self.judged[source] == Judged.PART for source in value.sources)
            self.mean_over = self.mean_over or (1 if value.in_backward and is_made_of_part else 0)
            return Judged.PART
        if value.in_backward and self._is_of_mean(value.tensor, shape, tolerance):
            return Judged.PART
        if total is not None and self.size > 1 and value.is_float:  # masks of the ranks add up to one of ones
            summand = self._as_summand(total, value, tolerance)
            if summand is not None:
                return summand
        is_padded = any(length in known.padded for length in (shape[:1] + shape[-1:]))
        is_wrong = value.is_float or self._are_other_places(place, total, tolerance)
        return Judged.WRONG if is_wrong and not is_padded else None

    def _is_of_mean(self, numbers: Fingerprint, shape: Shape, tolerance: float) -> bool:
        """True for a gradient of the mean over this rank's samples, of which the ranks of another axis take the mean.

        The first gradient of a part shows whether a program does so.
        """
        sizes = self.known.axes if self.mean_over == 0 else [size for size in self.known.axes if size == self.mean_over]
        scaled = [size for size in sizes if self.known.is_among(times(numbers, 1 / size), shape, self.rank, tolerance)]
        self.mean_over = scaled[0] if scaled else self.mean_over
        return bool(scaled)

    def _as_summand(self, total: Total, value: Value, tolerance: float) -> Judged | None:
        """How a value is right together with those of the other ranks; None where it is not."""
        shape, known = value.shape, self.known
        wholes = (-1, self.rank) if known.axes else (-1,)
        sums = ((total.sum, self.size), *total.elsewhere)
        if any(known.is_among(summed, shape, of, tolerance) for summed, _ in sums for of in wholes):
            return Judged.PARTIAL
        means = (times(summed, 1 / number) for summed, size in sums for number in {size, *known.axes})
        if any(known.is_among(mean, shape, of, tolerance) for mean in means for of in wholes):
            return Judged.AVERAGED
        numbers = known.whole.get(shape, []) if math.prod(shape) == 1 else []
        is_norm = any(math.isclose(total.norm, abs(right.tensor[0]), rel_tol=tolerance) for right in numbers)
        return Judged.NORM if is_norm else None

    def _are_other_places(self, place: int, total: Total | None, tolerance: float) -> bool:
        """True for a part of places that the reference was given by this name, where those of all ranks are not all."""
        value = self.values[place]
        wholes = self.known.given_as(value) if is_place(value) else []
        if not wholes or total is None or not total.moments:
            return False
        if any(is_near(total.moments, right.value.moments, tolerance) for right in wholes):
            return False
        return own_use(place, self.values, self.sums, size=self.size, tolerance=tolerance) is not None

    def _is_none_that_is_wrong(self, place: int, total: Total | None, tolerance: float) -> bool:
        """True where it does not matter that the reference has no equal."""
        is_excused = place in self.looked_up or self._is_row_of_part(place) or self._is_of_others(place, tolerance)
        return is_excused or place in self.in_own_loop or self._is_in_own_order(place, total, tolerance)

    def _follow(self, place: int) -> None:
        """Know of the next value whether a collective brought it, and whether a loop of the ranks' own made it."""
        value = self.values[place]
        is_brought, moves = _is_brought(value), value.name in PUTS_TOGETHER | SAME_VALUES
        if is_brought or (moves and not self.brought.isdisjoint(value.sources)):
            self.brought.add(place)
        is_gathered = is_brought and value.name not in SUMS_OVER_RANKS
        only_moves = (moves or is_gathered) and bool(value.sources) and self.in_own_loop.issuperset(value.sources)
        is_of_loop = self._is_counted_otherwise(place) and not self._is_carried_over_ranks(place)
        if only_moves or is_of_loop:
            self.in_own_loop.add(place)
        op = op_at_line(value)
        if is_of_loop and self.counts[op] * self.size in self.known.counts[op]:
            self.of_part.add(place)

    def _is_counted_otherwise(self, place: int) -> bool:
        """True for an op that runs once for each rank, where one rank runs it once, or a part of the times."""
        op = op_at_line(self.values[place])
        counts, own = self.known.counts.get(op, set()), self.counts[op]
        is_other = self.size > 1 and own not in counts
        return is_other and (own * self.size in counts or own in {count * self.size for count in counts})

    def _is_carried_over_ranks(self, place: int) -> bool:
        """True for what such a loop carries from one pass to the next, in the end: it is what one rank has."""
        op = op_at_line(self.values[place])
        is_once_for_each = self.counts[op] in {count * self.size for count in self.known.counts[op]}
        is_used_within = any(map(self._is_counted_otherwise, self.uses.get(place, [])))
        if not is_once_for_each or is_used_within or place != self.last[op]:
            return False
        return any(op_at_line(self.values[each]) == op for each in all_behind(self.values[place].sources, self.values))

    def _is_masked_by_wrong(self, place: int, tolerance: float) -> bool:
        """True for what a wrong mask made, and views of it: it may have left all as it was, which the reference has."""
        value = self.values[place]
        if value.name in SAME_VALUES:
            is_masked = not self.wrongly_masked.isdisjoint(value.sources)
        else:
            has_wrong = any(self.judged[source] == Judged.WRONG for source in value.sources)
            may_be = value.name in MASKS and value.tensor is not None and has_wrong
            is_masked = may_be and self.known.is_made_otherwise(value, self.rank, tolerance)
        if is_masked:
            self.wrongly_masked.add(place)
        return is_masked

    def _is_row_of_part(self, place: int) -> bool:
        """True for a right part as one row of numbers, of which no equal part of the whole row need be."""
        value = self.values[place]
        if value.name not in SAME_VALUES or len(value.shape) != 1 or len(value.sources) != 1:
            return False
        source = value.sources[0]
        return len(self.values[source].shape) > 1 and self.judged[source] == Judged.PART

    def _is_of_others(self, place: int, tolerance: float) -> bool:
        """True for the part of a different rank that a collective brought, or is put together to be sent in one.

        Each of the pieces of what was brought, and what is made of one, is one rank's in turn.
        """
        value, numbers = self.values[place], self.values[place].tensor
        is_piece = value.name in TAKES_APART and all(self.judged[source] == Judged.WHOLE for source in value.sources)
        is_made_of_them = value.name not in TAKES_APART and not self.of_others.isdisjoint(value.sources)
        is_one_of_all = value.name in ALL_PIECES and place in self.brought
        may_be = _is_brought(value) or is_one_of_all or is_made_of_them or (is_piece and self._is_only_sent(place))
        if numbers is None or not may_be:
            return False
        is_right = any(self.known.is_among(numbers, value.shape, rank, tolerance) for rank in range(self.size))
        if is_right and (is_one_of_all or is_made_of_them):
            self.of_others.add(place)
        return is_right

    def _is_only_sent(self, place: int) -> bool:
        """True where nothing but collectives is given a value, its views, and what they are put together in."""
        users = self.uses.get(place, [])
        return bool(users) and all(
            _is_brought(self.values[user])
            or (self.values[user].name in SAME_VALUES | PUTS_TOGETHER and self._is_only_sent(user))
            for user in users
        )

    def _is_in_own_order(self, place: int, total: Total | None, tolerance: float) -> bool:
        """True for numbers of the forward pass in another order that no op which moves them on its rank has made.

        A program may have an order of its own: it spread its tokens so, or a collective brought them so, and what it
        makes of them restores that of the reference. A view of what a collective brought may be what is wrong.
        """
        value = self.values[place]
        is_view = value.name in SAME_VALUES and not self.own_order.isdisjoint(value.sources)
        is_brought = _is_brought(value)
        if value.in_backward or not (is_view or is_brought or not may_move(value.name)):
            return False
        right = self.known.reordered(value, total, self.rank, tolerance)
        if right is not None and not is_brought:
            self.own_order.add(place)
        return right is not None


def _is_brought(value: Value) -> bool:
    """True for what a collective returned."""
    return value.name.startswith(COLLECTIVES)


def _as_made(sources: Sequence[Judged]) -> Judged:
    """How a value is right that the reference has nothing to compare with: as what it was made of."""
    if Judged.WRONG in sources:
        return Judged.WRONG
    summands = [judged for judged in sources if judged.is_summand]
    return summands[0] if summands else Judged.PART
