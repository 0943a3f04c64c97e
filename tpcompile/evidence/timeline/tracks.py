"""Streams of some ranks -> what they have in common to compare, from the first event that all of them kept: pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tpcompile.evidence.iterables import differ
from tpcompile.evidence.timeline.stream import Event, Kind, Place, Stream, ends_of

Counted = tuple[str, ...]
"""What numbers count, see `Event.sequence`."""
_MEETING = (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)
"""What ranks do together."""
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
    offset: int = 0
    """The position of its first step: positions count the steps of the rank that is known for longest."""

    def at(self, position: int) -> Step | None:
        """Its step at a position; None before what is known of it and after what it did."""
        number = position - self.offset
        return self.steps[number] if 0 <= number < len(self.steps) else None

    @property
    def end(self) -> int:
        """The position after its last step."""
        return self.offset + len(self.steps)

    def begins_at(self, position: int) -> bool:
        """True where it is not known what it did before."""
        return position == self.offset and not self.stream.is_whole


_FEW_MET = 3
"""So many collectives from places of their own make two ranks run different programs."""


def have_own_places(streams: Sequence[Stream]) -> bool:
    """True where two of these ranks met again and again, and never from a place that both of them have."""
    met = [_places_met(stream) for stream in streams]
    for mine, theirs in combinations(met, 2):
        common = mine.keys() & theirs.keys()
        places = {mine[one] for one in common}, {theirs[one] for one in common}
        if len(common) >= _FEW_MET and places[0].isdisjoint(places[1]):
            return True
    return False


def _places_met(stream: Stream) -> dict[tuple[Counted, int], Place]:
    """Collectives that have ended, by their numbers, and from where the rank issued them."""
    events = (event for event in stream.events if event.kind == Kind.COLLECTIVE and event.is_done and event.number)
    return {(event.sequence, event.number): event.place for event in events}


def in_step(streams: Sequence[Stream], *, is_one_program: bool) -> list[Track]:
    """What these ranks do together: collectives of groups of all of them, iterations of loops of all, and their ends.

    Of two ranks also what they send to each other: one sends where the other receives. Where the streams are of several
    programs, an event counts as equal wherever it was done.
    """
    groups = set(streams[0].groups).intersection(*(stream.groups for stream in streams))
    loops = _common(streams, [Kind.ITERATION]) if is_one_program else set()
    shared = loops | {(Kind.COLLECTIVE, group) for group in groups}
    if len(streams) == 2:
        shared |= {(kind, str(stream.rank)) for kind in (Kind.SEND, Kind.RECEIVE) for stream in streams}
    tracks = [_track(stream, shared, is_one_program=is_one_program) for stream in streams]
    return _side_by_side([_with_end(track) for track in tracks])


def each_for_itself(streams: Sequence[Stream]) -> Iterator[list[Track]]:
    """Calls of one region, compiles or breaks: a rank may have more of them, but those of one number are equal."""
    for one in sorted(_common(streams, [Kind.CALL, Kind.COMPILE, Kind.BREAK])):
        yield _side_by_side([_track(stream, [one], is_one_program=True) for stream in streams])


def _common(streams: Sequence[Stream], kinds: Collection[Kind]) -> set[Counted]:
    """Sequences of these kinds that all streams have."""
    of_rank = [{event.sequence for event in stream.events if event.kind in kinds} for stream in streams]
    return set.intersection(*of_rank)


def _side_by_side(tracks: list[Track]) -> list[Track]:
    """The tracks with their offsets, without those that have no number in common with the longest one."""
    if all(track.stream.is_whole for track in tracks):
        return tracks
    counted = [_counted(track) for track in tracks]
    longest = max(counted, key=len)
    offsets = [_offset(longest, numbers) for numbers in counted]
    beside = [(track, offset) for track, offset in zip(tracks, offsets, strict=True) if offset is not None]
    earliest = min((offset for _, offset in beside), default=0)
    return [replace(track, offset=offset - earliest) for track, offset in beside]


def _counted(track: Track) -> dict[tuple[Counted, int], int]:
    """Sequence and number -> step."""
    steps = enumerate(track.steps)
    return {(step.event.sequence, step.event.number): at for at, step in steps if step.event.number}


def _offset(reference: Mapping[tuple[Counted, int], int], numbers: Mapping[tuple[Counted, int], int]) -> int | None:
    """How many steps later a track begins than the reference; None where that is not known."""
    common = reference.keys() & numbers.keys()
    if not common:
        return None
    # collectives meet under their numbers, so that these count: iterations of ranks may be apart
    begin = min(common, key=lambda one: (one[0][0] != Kind.COLLECTIVE, reference[one] + numbers[one]))
    return reference[begin] - numbers[begin]


def _track(stream: Stream, shared: Collection[Counted], *, is_one_program: bool) -> Track:
    events = [(index, event) for index, event in enumerate(stream.events) if event.sequence in shared]
    steps = [_step(index, event, stream.rank, is_one_program=is_one_program) for index, event in events]
    return Track(stream, tuple(steps))


def _with_end(track: Track) -> Track:
    """The track, with the end of its rank as its last step, if it has ended."""
    stream = track.stream
    end = stream.end
    if end is None:
        return track
    is_recorded = stream.events[-1:] == (end,)
    index = len(stream.events) - is_recorded
    # the line of an end is why the rank ended, not where that was due
    return replace(track, steps=(*track.steps, _step(index, end, stream.rank, is_one_program=False)))


def _step(index: int, event: Event, rank: int, *, is_one_program: bool) -> Step:
    program: Hashable = event.kind, event.name, event.group, event.place if is_one_program else ()
    if event.peer is not None:
        program = Kind.SEND, ends_of(event, rank)  # the two ends of one message are at different lines
    return Step(event, index, program, (program, tuple(sorted(event.content.items())), event.is_unlike))


def first_difference(tracks: Sequence[Track]) -> int | None:
    """The first position at which ranks differ; None where they do not."""
    position, end = 0, max((track.end for track in tracks), default=0)
    while position < end:
        if differ(step.key for step in at(tracks, position).values()):
            num_alike = _num_reordered(tracks, position) or int(_is_habit(tracks, position))
            if not num_alike:
                return position
            position += num_alike
        else:
            position += 1
    return None


def _is_habit(tracks: Sequence[Track], position: int) -> bool:
    """True where the ranks come to one collective from lines of their own, and together go on: a branch may do that."""
    here = at(tracks, position)
    if differ(_without_place(step) for step in here.values()):
        return False
    ends = range(max(track.end for track in tracks))
    times = [other for other in ends if _is_alike(at(tracks, other), here)]
    return len(times) > 1 and any(_are_together(at(tracks, other + 1), here) for other in times)


def _is_alike(there: Mapping[int, Step], here: Mapping[int, Step]) -> bool:
    return there.keys() == here.keys() and all(there[rank].key == step.key for rank, step in here.items())


def _are_together(there: Mapping[int, Step], here: Mapping[int, Step]) -> bool:
    return there.keys() == here.keys() and not differ(step.key for step in there.values())


def _without_place(step: Step) -> Hashable:
    event = step.event
    return event.name, event.sequence, event.number, tuple(sorted(event.content.items()))


def first_content(tracks: Sequence[Track]) -> int | None:
    """The same for content alone; None from where the ranks do not do the same events any more."""
    for position in range(max((track.end for track in tracks), default=0)):
        here = at(tracks, position).values()
        if differ(step.program for step in here):
            return None
        if differ(step.key for step in here):
            return position
    return None


def at(tracks: Sequence[Track], position: int) -> dict[int, Step]:
    """Rank -> its step at a position, of the ranks that have come there."""
    steps = {track.stream.rank: track.at(position) for track in tracks}
    return {rank: step for rank, step in steps.items() if step is not None}


def _num_reordered(tracks: Sequence[Track], position: int) -> int:
    """The number of steps after which all ranks have done the same in different orders; 0 if they have not.

    Collectives and messages alone, that have ended: all ranks took part in them, so that none waits for one that went a
    different way.
    """
    here = [track for track in tracks if track.at(position)]
    for length in range(2, _REORDERED + 1):
        parts = [[track.at(position + number) for track in here] for number in range(length)]
        steps = list(zip(*parts, strict=True))
        if all(map(_are_over, steps)) and not differ(frozenset(map(_numbered, of_rank)) for of_rank in steps):
            return length
    return 0


def _are_over(steps: Sequence[Step | None]) -> bool:
    return all(step and step.event.is_done and step.event.kind in _MEETING for step in steps)


def _numbered(step: Step | None) -> Hashable:
    return step and (step.key, step.event.number)


def parted_earlier(tracks: Sequence[Track], position: int) -> bool:
    """True when the ranks parted before what is known begins.

    Then equal steps have different numbers, or the first known one of a rank differs and it went on from there.
    """
    if all(track.stream.is_whole for track in tracks):
        return False
    for track in tracks:
        if track.begins_at(position) and len(track.steps) > 1:
            return True
    for earlier in range(position):
        numbers = {step.event.number for step in at(tracks, earlier).values()}
        if len(numbers - {0}) > 1:
            return True
    return False
