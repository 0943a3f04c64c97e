"""What one rank did, in the order in which it did it: events with what ranks compare, frozen records, JSON."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from tpcompile.evidence.records import Frozen, UserLine
from tpcompile.evidence.records.bounds import Number, Rank

Place = tuple[tuple[str, int], ...]
"""Files and lines of a stack, outermost first."""


class Kind(StrEnum):
    """What a rank did."""

    ITERATION = "iteration"
    """It began an iteration of a loop of the program."""
    CALL = "call"
    """It called a compiled region."""
    COMPILE = "compile"
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    BREAK = "graph break"
    END = "end"


class How(StrEnum):
    """How a stream ends."""

    RUNNING = "running"
    """The rank may go on: it computes, or nothing newer is known."""
    WAITING = "waiting"
    """It waits in its last event."""
    FINISHED = "finished"
    RAISED = "raised"
    EXITED = "exited"
    KILLED = "killed"
    ABORTED = "aborted"


def place_of(stack: Iterable[UserLine]) -> Place:
    """Files and lines of a stack."""
    return tuple((frame.file, frame.line) for frame in stack)


class Event(Frozen):
    """One thing that a rank did."""

    kind: Kind
    name: str = ""
    """The op of a collective, the region of a call; empty for an iteration, which its stack tells from others."""
    group: str = ""
    """Role of the process group, equal on ranks that have the same part in the program; empty without a group."""
    content: dict[str, str] = {}
    """What must be equal on all ranks beside the name: dtype, variant, sizes where they must agree."""
    own: dict[str, str] = {}
    """What may differ, e.g. sizes of each rank's own choice."""
    peer: Rank | None = None
    """The other rank of a send or receive."""
    number: Number = 0
    """Number in its sequence on this rank, from 1; 0 where it is not counted."""
    region: str = ""
    """The compiled region whose call issued it; empty outside of compiled code."""
    call: Number = 0
    """Number of that call."""
    call_depth: Number = 0
    """How many frames of the stack lead to that call; 0 outside of compiled code."""
    stack: tuple[UserLine, ...] = ()
    """The user's frames, outermost first."""
    loops: tuple[tuple[int, int], ...] = ()
    """For each frame the first and last line of the innermost loop around it; 0, 0 without one. Empty if unknown."""
    is_done: bool = True
    """False for a collective, send or receive that has not ended."""
    is_unlike: bool = False
    """The rank aborted in it, as its content does not fit that of the others; what it was is not known."""

    @property
    def place(self) -> Place:
        """Files and lines from which it was done."""
        return place_of(self.stack)

    @property
    def sequence(self) -> tuple[str, ...]:
        """What its number counts: collectives of a group, sends to a rank, calls of a region, iterations of a loop."""
        if self.peer is not None:
            return self.kind, str(self.peer)
        if self.group:
            return self.kind, self.group
        if self.kind == Kind.ITERATION:
            return self.kind, str(self.place)
        return self.kind, self.name


def ends_of(event: Event, rank: int) -> tuple[int, int] | None:
    """(From, to) of what a rank sends or receives: one message on both of them; None for what is no message."""
    if event.peer is None:
        return None
    return (rank, event.peer) if event.kind == Kind.SEND else (event.peer, rank)


class Stream(Frozen):
    """What one rank did, as far as it is known."""

    rank: Rank
    events: tuple[Event, ...]
    """Oldest first. An event of kind END, if there is one, is the last: it has the line at which the rank ended."""
    is_whole: bool = True
    """False where the first events are not known: rings and torch's flight recorder keep the last ones."""
    how: How = How.RUNNING
    groups: dict[str, tuple[Rank, ...]] = {}
    """Role -> ranks, of every process group this rank is in."""

    @property
    def end(self) -> Event | None:
        """The end of this rank as an event; None for a rank that may go on, and for one that ended as a consequence.

        A collective whose ranks do not fit aborts or raises on some of them: that is how they part, not why.
        """
        newest = self.events[-1] if self.events else None
        if newest is not None and newest.kind == Kind.END:
            inside, end = self.events[-2:-1], newest
        else:
            inside, end = self.events[-1:], Event(kind=Kind.END, name=self.how)
        is_inside = any(not event.is_done for event in inside)
        is_consequence = is_inside and self.how in (How.ABORTED, How.RAISED)
        may_go_on = self.how in (How.RUNNING, How.WAITING)
        return None if may_go_on or is_consequence else end


class TimedStream(Frozen):
    """A stream with its clock, for people: times are compared by nobody."""

    stream: Stream
    times: tuple[float, ...]
    """Unix time of each event."""
    until: float
    """Unix time at which the rank was asked: what is not done went on until then."""
