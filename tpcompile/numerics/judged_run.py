"""A run of one rank, judged, and what the reference has for each of its values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tpcompile.evidence.iterables import find
from tpcompile.numerics.judged import SUMMANDS, Judged, Known, Right, Total, all_behind, behind, is_near, times
from tpcompile.numerics.op_names import (
    COLLECTIVES,
    LINEAR,
    NEGATES,
    POWERS,
    PRODUCTS,
    PUTS_TOGETHER,
    SAME_VALUES,
    SUMS_OVER_RANKS,
)
from tpcompile.numerics.trace import Value


@dataclass(frozen=True)
class Evidence:
    """A run of one rank, judged."""

    values: Sequence[Value]
    judged: Sequence[Judged]
    known: Known
    sums: Sequence[Total | None]
    tolerance: float
    rank: int
    size: int
    own_order: Collection[int] = ()
    """Places of what the program holds in an order of its own."""
    of_part: AbstractSet[int] = frozenset()
    """Places of what a loop over this rank's part made: on one rank it runs more often."""

    def divided_behind(self, places: Iterable[int]) -> int:
        """The first of the summands behind these that was made of no summand."""
        return self.made_of_no_summand(places)[0]

    def made_of_no_summand(self, places: Iterable[int]) -> list[int]:
        """Those of the summands behind these, in their order."""
        summands = behind(places, self.values, self.judged, set(SUMMANDS))
        return sorted(place for place in summands if summands.isdisjoint(self.values[place].sources))

    def given(self, place: int, *judged: Judged) -> list[int]:
        """Those of the sources of a value that are judged so."""
        return [source for source in self.values[place].sources if self.judged[source] in judged]

    def multiple(self, place: int, factor: float) -> Right | None:
        """The value of the reference, or the rank's part of one, of which this is a multiple."""
        value = self.values[place]
        is_of_data = any(self.values[each].is_given for each in all_behind([place], self.values))
        if value.tensor is None or self.size == 1 or not is_of_data:  # positions are multiples of others by chance
            return None
        scaled = times(value.tensor, 1 / factor)
        candidates = (right for right in self.known.with_shape(value.shape) if right.rank in (-1, self.rank))
        return find(candidates, lambda right: is_near(scaled, right.tensor, self.tolerance))

    def same_place(self, value: Value) -> Right | None:
        """The value of the reference that the same op on the same line made."""
        at_line = (right for right in self.known.with_shape(value.shape) if right.rank in (-1, self.rank))
        return find(at_line, lambda right: (right.value.name, right.value.line) == (value.name, value.line))

    def made_at(self, place: int) -> int:
        """The op that made the numbers of which this is a copy, or a view; a value that the reference has is none."""
        value = self.values[place]
        while value.name in SAME_VALUES and len(value.sources) == 1:
            source = value.sources[0]
            made = self.values[source]
            is_all = math.prod(made.shape) <= math.prod(value.shape)
            if not is_all or made.is_given or made.line is None or self.is_known(made):
                break
            place, value = source, made
        return place

    def is_known(self, value: Value) -> bool:
        """True where the reference has it, or has it as the rank's part of a value."""
        return self.known.has(value, self.rank, self.tolerance)

    def is_other_order(self, place: int) -> bool:
        """True for a value of a forward pass that has the numbers of one of the reference in a different order."""
        value = self.values[place]
        may_be = self.judged[place] == Judged.WRONG and not value.in_backward
        return may_be and self.known.in_other_order(value, self.tolerance) is not None

    def wrong_places_given(self, places: Iterable[int]) -> set[int]:
        """The integers that the run was given, of what these were made from, which are none of this rank's.

        What is looked up by them may be right by itself, as that of a different rank.
        """
        made_of = all_behind(places, self.values)
        given = {place for place in made_of if self.values[place].is_given and not self.values[place].is_float}
        return {place for place in given if self.judged[place] == Judged.WRONG}

    def made_mask(self, place: int) -> int:
        """The op that made the mask of a masked value; the value itself where that was given."""
        masks = [source for source in self.values[place].sources if not self.values[source].is_float]
        made = masks[0] if masks else place
        while self.values[made].name in SAME_VALUES | NEGATES and self.values[made].sources:
            made = self.values[made].sources[0]
        return place if self.values[made].is_given else made

    def put_together(self, place: int) -> int | None:
        """What an op was given was put together of parts first, and is none that the reference has; None for none."""
        for at in sorted(self.unknown_behind(place)):
            name = self.values[at].name
            is_together = name in PUTS_TOGETHER or name.startswith(COLLECTIVES)
            if is_together and not self._is_taken_apart(at):
                return at
        return None

    def _is_taken_apart(self, place: int) -> bool:
        """True where an op takes out of it what some rank has."""
        copies = {place}
        for at in range(place + 1, len(self.values)):
            value = self.values[at]
            if copies.isdisjoint(value.sources):
                continue
            if value.shape == self.values[place].shape:
                copies.add(at)
                continue
            numbers, shape = value.tensor, value.shape
            ranks = range(self.size) if numbers is not None else ()
            if any(self.known.is_among(numbers or (), shape, rank, self.tolerance) for rank in ranks):
                return True
        return False

    def unknown_behind(self, place: int) -> set[int]:
        """What a value was made of, back to what the reference has."""
        reached, left = set[int](), list(self.values[place].sources)
        while left:
            at = left.pop()
            if at not in reached and not self.is_known(self.values[at]):
                reached.add(at)
                left += self.values[at].sources
        return reached

    def nearest_unknown(self, place: int, names: Collection[str]) -> int | None:
        """Of this and what it was made of, back to what the reference has, the last that one of these ops made."""
        return max((at for at in {place, *self.unknown_behind(place)} if self.values[at].name in names), default=None)

    def first_in_other_order(self, place: int) -> int | None:
        """Of this and what it was made from the first that has the numbers of the reference in a different order."""
        first, now = None, find((place,), self.is_other_order)
        while now is not None:
            first, now = now, find(self.values[now].sources, self.is_other_order)
        return first

    def parameter_behind(self, place: int) -> str:
        """The parameter that a value which is no more than a product with it comes from; empty where there is none."""
        for source in self.values[place].sources:
            value = self.values[source]
            if value.is_given and value.name != "an input" and self.judged[source] == Judged.PART:
                return value.name
            is_followed = value.name in SAME_VALUES or value.name in PRODUCTS
            found = self.parameter_behind(source) if is_followed else ""
            if found:
                return found
        return ""

    def taken_at(self, place: int, gradient: Value) -> int | None:
        """Where a parameter with this gradient that an op is given was taken, the first of its views; None for none.

        Views that the op's own line makes are those of the op.
        """
        for source in self.values[place].sources:
            if math.prod(self.values[source].shape) != math.prod(gradient.shape):
                continue
            taken, at = None, source
            while self.values[at].name in SAME_VALUES and len(self.values[at].sources) == 1:
                taken, at = at, self.values[at].sources[0]
            parameter = self.values[at]
            is_parameter = parameter.is_given and parameter.name != "an input"
            if taken is not None and is_parameter and self.values[taken].line != self.values[place].line:
                return taken
        return None

    def is_made_of_both(self, place: int) -> bool:
        """True for what is made of one tensor that was put together of replicated ones and of parts of this rank."""
        return any(map(self.is_of_both, self.values[place].sources))

    def is_of_both(self, place: int) -> bool:
        """True for what was put together of whole values and of parts."""
        put_together = self.values[place].name in PUTS_TOGETHER
        return put_together and bool(self.given(place, Judged.WHOLE) and self.given(place, Judged.PART))

    def is_only_combined(self, place: int) -> bool:
        """True where nothing but a reduction over ranks is given the value: it is used for nothing by itself."""
        uses = [value for value in self.values[place + 1 :] if place in value.sources]
        return bool(uses) and all(value.name in SUMS_OVER_RANKS for value in uses)

    def summed_later(self, place: int) -> int | None:
        """The sum over the ranks that is made of this value, or of what linear ops and powers made of it."""
        reached = {place}
        for number in range(place + 1, len(self.values)):
            value = self.values[number]
            if reached.isdisjoint(value.sources):
                continue
            if value.name in SUMS_OVER_RANKS:
                return number
            if value.name in LINEAR or value.name in POWERS:
                reached.add(number)
        return None
