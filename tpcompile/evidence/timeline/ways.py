"""Tracks and the position at which they differ -> the ways that the ranks went, each with what it did before: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.iterables import find, grouped
from tpcompile.evidence.timeline.parting import Side
from tpcompile.evidence.timeline.stream import Event, Kind, Stream
from tpcompile.evidence.timeline.tracks import Step, Track, at


@dataclass(frozen=True)
class Way:
    """Ranks that did the same at the parting."""

    ranks: tuple[int, ...]
    steps: tuple[Step, ...]
    """What the first of them did from there on."""
    past: tuple[Step, ...]
    """What they did before, as far as it is known: what all did, if all agreed in something."""
    knows_start: bool
    """True where that goes back to the start of the job: what is not in it was never done."""
    side: Side
    """The same for the reader."""
    stream: Stream
    """That of the first of them."""
    own: tuple[Mapping[str, str], ...]
    """Of each of them the content that may differ between ranks."""

    @property
    def first(self) -> Step:
        """Where they went."""
        return self.steps[0]

    @property
    def has_ended(self) -> bool:
        """True where they ended."""
        return self.first.event.kind == Kind.END

    @property
    def going_on(self) -> tuple[Step, ...]:
        """What they did from there on, without their end."""
        return tuple(step for step in self.steps if step.event.kind != Kind.END)


def common_past(ways: Sequence[Way]) -> tuple[Step, ...]:
    """What all did before: of a rank that aborted only the last event is known, so its past is that of the others."""
    return max((way.past for way in ways), key=len)


def ways_at(tracks: Sequence[Track], position: int) -> list[Way]:
    """The ways at a position, that of most ranks first; ranks that have not come there are in none."""
    here = at(tracks, position)
    groups = sorted(grouped(here, lambda rank: here[rank].key).values(), key=lambda ranks: (-len(ranks), ranks))
    # all agreed, so that what one rank still knows of the past is the past of all
    longest = min(tracks, key=lambda track: track.offset)
    past = longest.steps[:position]
    of_rank = {track.stream.rank: track for track in tracks}
    ways = []
    for ranks in groups:
        alike = [of_rank[rank] for rank in ranks]
        is_known = not all(track.begins_at(position) for track in alike)
        track = alike[0]
        ways.append(
            Way(
                ranks=tuple(ranks),
                steps=track.steps[position - track.offset :],
                past=past if is_known else (),
                knows_start=is_known and longest.stream.is_whole,
                side=_side(alike, position),
                stream=track.stream,
                own=tuple(here[rank].event.own for rank in ranks),
            )
        )
    return ways


def _side(tracks: Sequence[Track], position: int) -> Side:
    ranks = tuple(track.stream.rank for track in tracks)
    starts = tuple(_start(track, position) for track in tracks)
    events = tracks[0].stream.events[starts[0] :]
    end = tracks[0].steps[-1].event  # it need not be an event of the stream
    return Side(ranks, events or (end,), starts, tracks[0].steps[position - tracks[0].offset].event)


def _start(track: Track, position: int) -> int:
    """The index in a stream at which the rank went its way: that of the call of the region that issued what differs.

    A call in which the ranks agreed before is not where they part.
    """
    number = position - track.offset
    step = track.steps[number]
    since = track.steps[number - 1].index + 1 if number else 0
    call = find(range(since, step.index), lambda index: _is_call_of(step.event, track.stream.events[index]))
    return step.index if call is None else call


def _is_call_of(issued: Event, event: Event) -> bool:
    return event.kind == Kind.CALL and (event.name, event.number) == (issued.region, issued.call)
