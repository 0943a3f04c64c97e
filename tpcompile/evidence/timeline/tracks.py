"""Streams of some ranks -> what they have in common to compare, from the first event that all of them kept: pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from tpcompile.evidence.iterables import differ
from tpcompile.evidence.timeline.stream import Event, Kind, Stream

Counted = tuple[str, ...]
"""What numbers count, see `Event.sequence`."""
_REORDERED = 8
"""Events within which ranks may do the same in different orders: two threads may issue collectives."""


@dataclass(frozen=True)
class Step:
    """An event of one rank that is compared."""

    event: Event
    index: int
    """Its index in the stream; an end that is no event of it comes after all."""
    program: Hashable
    """Which event of the program it is."""
    key: Hashable
    """The same with its content: equal on ranks that agree."""


@dataclass(frozen=True)
class Track:
    """Of one rank the events in which all compared ranks have a part, and its end."""

    stream: Stream
    steps: tuple[Step, ...]
    start: int = 0
    """The step at which the comparison begins."""

    @property
    def compared(self) -> tuple[Step, ...]:
        """The steps from there on."""
        return self.steps[self.start :]


def in_step(streams: Sequence[Stream], *, is_one_program: bool) -> list[Track]:
    """What these ranks do together: collectives of groups of all of them, iterations of loops of all, and their ends.

    Where the streams are of several programs, an event counts as equal wherever it was done.
    """
    groups = set(streams[0].groups).intersection(*(stream.groups for stream in streams))
    loops = _common(streams, [Kind.ITERATION]) if is_one_program else set()
    shared = loops | {(Kind.COLLECTIVE, group) for group in groups}
    tracks = [_track(stream, shared, is_one_program=is_one_program) for stream in streams]
    return _begun_together([_with_end(track) for track in tracks])


def each_for_itself(streams: Sequence[Stream]) -> Iterator[list[Track]]:
    """Calls of one region, compiles or breaks: a rank may have more of them, but those of one number are equal."""
    for one in sorted(_common(streams, [Kind.CALL, Kind.COMPILE, Kind.BREAK])):
        yield _begun_together([_track(stream, [one], is_one_program=True) for stream in streams])


def _common(streams: Sequence[Stream], kinds: Collection[Kind]) -> set[Counted]:
    """Sequences of these kinds that all streams have."""
    of_rank = [{event.sequence for event in stream.events if event.kind in kinds} for stream in streams]
    return set.intersection(*of_rank)


def _begun_together(tracks: list[Track]) -> list[Track]:
    """The tracks from the first event that all of them have; none where they have none in common."""
    if all(track.stream.is_whole for track in tracks):
        return tracks
    numbered = [{(step.event.sequence, step.event.number): at for at, step in _backwards(track)} for track in tracks]
    common = set(numbered[0]).intersection(*numbered[1:])
    if not common:
        return []
    # collectives meet under their numbers, so that these count: iterations of ranks may be apart
    begin = min(common, key=lambda one: (one[0][0] != Kind.COLLECTIVE, sum(starts[one] for starts in numbered)))
    return [replace(track, start=starts[begin]) for track, starts in zip(tracks, numbered, strict=True)]


def _backwards(track: Track) -> list[tuple[int, Step]]:
    counted = [(at, step) for at, step in enumerate(track.steps) if step.event.number]
    return counted[::-1]


def _track(stream: Stream, shared: Collection[Counted], *, is_one_program: bool) -> Track:
    events = [(index, event) for index, event in enumerate(stream.events) if event.sequence in shared]
    return Track(stream, tuple(_step(index, event, is_one_program=is_one_program) for index, event in events))


def _with_end(track: Track) -> Track:
    """The track, with the end of its rank as its last step, if it has ended."""
    end = track.stream.end
    if end is None:
        return track
    is_recorded = track.stream.events[-1:] == (end,)
    index = len(track.stream.events) - is_recorded
    return replace(track, steps=(*track.steps, _step(index, end, is_one_program=True)))


def _step(index: int, event: Event, *, is_one_program: bool) -> Step:
    is_placed = is_one_program and event.kind != Kind.END  # the line of an end is why it ended, not where it is due
    program = event.kind, event.name, event.group, event.place if is_placed else ()
    return Step(event, index, program, (program, tuple(sorted(event.content.items()))))


def first_difference(tracks: Sequence[Track]) -> int | None:
    """The number of compared steps in which these ranks agree; None where they agree in all."""
    position = 0
    while True:
        here = at(tracks, position)
        if len(here) < 2:
            return None
        if differ(step.key for step in here.values()):
            num_reordered = _num_reordered(tracks, position)
            if not num_reordered:
                return position
            position += num_reordered
        else:
            position += 1


def first_content(tracks: Sequence[Track]) -> int | None:
    """The same for content alone; None from where the ranks do not do the same events any more."""
    position = 0
    while len(here := at(tracks, position)) > 1:
        if differ(step.program for step in here.values()):
            return None
        if differ(step.key for step in here.values()):
            return position
        position += 1
    return None


def at(tracks: Sequence[Track], position: int) -> dict[int, Step]:
    """Rank -> its step at a position, of the ranks that have come there."""
    reached = [track for track in tracks if track.start + position < len(track.steps)]
    return {track.stream.rank: track.steps[track.start + position] for track in reached}


def _num_reordered(tracks: Sequence[Track], position: int) -> int:
    """The number of steps after which all ranks have done the same in different orders; 0 if they have not.

    Collectives alone, that have ended: all ranks took part in them, so no rank waits for one that goes a different way.
    """
    for length in range(2, _REORDERED + 1):
        parts = [track.compared[position : position + length] for track in tracks]
        if all(map(_is_over, parts)) and not differ(frozenset(map(_numbered, part)) for part in parts):
            return length
    return 0


def _is_over(steps: Sequence[Step]) -> bool:
    return all(step.event.is_done and step.event.kind == Kind.COLLECTIVE for step in steps)


def _numbered(step: Step) -> Hashable:
    return step.key, step.event.sequence, step.event.number


def is_shifted(tracks: Sequence[Track], position: int) -> bool:
    """True when equal steps before a position have different numbers: the ranks parted before what is known begins."""
    return any(differ(step.event.number for step in at(tracks, earlier).values()) for earlier in range(position))
