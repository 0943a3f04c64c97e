"""Where ranks parted: the record that alignment makes, and the line where stacks part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tpcompile.evidence.iterables import differ, first, last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.expect import num_equal
from tpcompile.evidence.timeline.stream import Event, ends_of


class Edit(StrEnum):
    """What an odd rank did with the common program."""

    LEFT_OUT = "left out"
    """It did a later event, without those before it."""
    ADDED = "added"
    """It did more than was due: an event before it, or once more what it had done before."""
    INSTEAD = "instead"
    """It did something else; where its stream stops there, it may have been added as well."""
    ENDED = "ended"
    CONTENT = "content"
    """It did the same event with different content."""
    UNDECIDED = "undecided"
    """Nobody is known to have left the program, or the ranks parted before what is known begins."""


class Why(StrEnum):
    """Why these ranks are the odd ones."""

    MAJORITY = "majority"
    OWN_PAST = "own past"
    """All did the same before, and what the other ranks did is what followed then."""
    END = "end"
    """They ended, and the other ranks go on."""
    NONE = "none"
    """Nobody is blamed."""


@dataclass(frozen=True)
class Side:
    """Ranks that went the same way."""

    ranks: tuple[int, ...]
    events: tuple[Event, ...]
    """What the first of them did from the parting on; the first event is where they went."""
    starts: tuple[int, ...]
    """Index of that event in the stream of each rank; of an end that is no event, the number of events."""
    compared: Event
    """What differs from the other sides: of a call that issued it, the collective."""

    @property
    def event(self) -> Event:
        """Where they went."""
        return self.events[0]


@dataclass(frozen=True)
class Parting:
    """The first event at which ranks differ."""

    before: Event | None
    """The last event on which all agreed; None where they part before what is known begins."""
    sides: tuple[Side, ...]
    """The largest first. Ranks that have not come there yet are in none."""
    due: tuple[Event, ...]
    """What the common past, and the ranks that are not odd, say comes next."""
    edit: Edit
    odd: tuple[int, ...]
    why: Why

    @property
    def starts(self) -> dict[int, int]:
        """For each rank that has come there the index, in its stream, of the event where it went."""
        return {rank: at for side in self.sides for rank, at in zip(side.ranks, side.starts, strict=True)}

    @property
    def odd_side(self) -> Side:
        """The side of the odd ranks, or the smallest one."""
        return first(side for side in self.sides if side.ranks[0] in self.odd) or self.sides[-1]

    @property
    def usual_side(self) -> Side | None:
        """The side of ranks that stayed in the common program."""
        return first(side for side in self.sides if side is not self.odd_side and side.ranks[0] not in self.odd)

    @property
    def usual(self) -> Event | None:
        """What the other ranks did there, or what was due, at the odd rank's own line where that is known."""
        due, side = first(self.due), self.usual_side
        if due is None or side is None:
            return side.event if side is not None else due
        is_own = (due.kind, due.place) != (side.compared.kind, side.compared.place)
        return due if is_own else side.event

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that differ where the ranks did the same event; empty where they did different ones."""
        events = [side.compared for side in self.sides]
        messages = [ends_of(side.compared, side.ranks[0]) for side in self.sides]
        if differ(messages):
            return ()
        if None in messages and differ((event.kind, event.name, event.group, event.place) for event in events):
            return ()
        if any(event.is_unlike for event in events):
            return ("sizes, dtypes or split sizes",)
        contents = [event.content for event in events]
        names = sorted(set[str]().union(*contents))
        return tuple(name for name in names if differ(content.get(name) for content in contents))

    @property
    def left_out(self) -> UserLine | None:
        """The innermost line of what the odd ranks left out."""
        return last(self.usual.stack) if self.edit == Edit.LEFT_OUT and self.usual is not None else None

    @property
    def line(self) -> UserLine | None:
        """The frame at which the stacks of the sides part, of the side that did what the other did not."""
        mine = self.odd_side.event
        if self.edit == Edit.ENDED and mine.stack:
            return mine.stack[-1]  # where it raised or left, not a call on the way there
        theirs = self.usual
        lacks_it = self.edit in (Edit.LEFT_OUT, Edit.ENDED)
        if lacks_it and theirs is not None:
            mine, theirs = theirs, mine
        return own_frame(mine, [other for other in (theirs, self.before) if other is not None])


def own_frame(event: Event, others: Iterable[Event]) -> UserLine | None:
    """The outermost frame of an event that no stack of the others shares; the innermost where one shares all.

    The innermost, too, where there is no stack to compare it with.
    """
    shared = max((num_equal(event.place, other.place) for other in others if other.stack), default=len(event.stack))
    own = event.stack[shared:] or event.stack[-1:]
    return first(own)
