"""Streams of ranks -> their parting: where each went, what was due, which ranks left the common program: pure.

The ranks agree up to some event. There they part: most of them, or those that go on as all did before, are in the common
program, and what the others did is compared with it. No kind of fault has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.timeline.expect import num_equal, replayed
from tpcompile.evidence.timeline.parting import Edit, Parting, Side, Why
from tpcompile.evidence.timeline.stream import Event, Kind, Stream
from tpcompile.evidence.timeline.tracks import Step, Track, at, common_tracks, first_difference, is_shifted

_AHEAD = 60
"""Events of the common program that are searched for what an odd rank did; an iteration seldom has more."""


def align(streams: Mapping[int, Stream], domains: Sequence[Collection[int]] = ()) -> Parting | None:
    """The first parting of these ranks; None where none of them did anything that another did not.

    Ranks of different domains (pipeline stages) run different programs and only share what they do in common groups.
    """
    found = None
    for ranks in _compared(streams):
        is_one_program = not domains or any(set(ranks) <= set(domain) for domain in domains)
        tracks = common_tracks([streams[rank] for rank in ranks], is_one_program=is_one_program)
        parting = _parting_in(tracks) if tracks else None
        if parting and (found is None or _precedes(parting, found)):
            found = parting
    return found


def _compared(streams: Mapping[int, Stream]) -> list[tuple[int, ...]]:
    """All ranks, and those of each process group, the most first: fewer ranks have more in common."""
    groups = {members for stream in streams.values() for members in stream.groups.values()}
    known = {tuple(sorted(streams.keys() & set(members))) for members in groups} | {tuple(sorted(streams))}
    return sorted((ranks for ranks in known if len(ranks) > 1), key=lambda ranks: (-len(ranks), ranks))


def _precedes(one: Parting, other: Parting) -> bool:
    """True when a rank of both parted earlier in the first."""
    mine, theirs = _starts(one), _starts(other)
    return any(mine[rank] < theirs[rank] for rank in mine.keys() & theirs.keys())


def _starts(parting: Parting) -> dict[int, int]:
    return {rank: start for side in parting.sides for rank, start in zip(side.ranks, side.starts, strict=True)}


@dataclass(frozen=True)
class _Way:
    """Ranks that did the same at the parting, and what the first of them did from there on."""

    ranks: tuple[int, ...]
    steps: tuple[Step, ...]
    side: Side

    @property
    def has_ended(self) -> bool:
        return self.steps[0].event.kind == Kind.END


def _parting_in(tracks: Sequence[Track]) -> Parting | None:
    position = first_difference(tracks)
    if position is None:
        return None
    longest = max(tracks, key=lambda track: track.start)
    past = longest.steps[: longest.start + position]
    ways = _ways(tracks, position)
    sides = tuple(way.side for way in ways)
    before = past[-1].event if past else None
    is_cut = any(not track.stream.is_whole for track in tracks)
    if is_cut and (position == 0 or is_shifted(tracks, position)):
        return _earlier(ways, past) or Parting(None, sides, (), Edit.UNDECIDED, (), Why.NONE)
    usual, why = _usual(ways, past)
    due = _due(past, usual)
    events = tuple(step.event for step in due)
    if usual is None:
        return Parting(before, sides, events, Edit.UNDECIDED, (), why)
    others = [way for way in ways if way is not usual]
    odd = tuple(sorted(rank for way in others for rank in way.ranks))
    return Parting(before, sides, events, _edit(others[0], due, past), odd, why)


def _ways(tracks: Sequence[Track], position: int) -> list[_Way]:
    """The ranks by what they did at a position; ranks that have not come there are left out."""
    of_rank = {track.stream.rank: track for track in tracks}
    here = at(tracks, position)
    groups = sorted(grouped(here, lambda rank: here[rank].key).values(), key=lambda ranks: (-len(ranks), ranks))
    return [_way([of_rank[rank] for rank in ranks], position) for ranks in groups]


def _way(tracks: Sequence[Track], position: int) -> _Way:
    ranks = tuple(track.stream.rank for track in tracks)
    starts = tuple(_call_of(track, position) for track in tracks)
    track = tracks[0]
    steps = track.steps[track.start + position :]
    ends = (steps[0].event,) if steps[0].event.kind == Kind.END else ()
    events = track.stream.events[starts[0] :] or ends
    return _Way(ranks, steps, Side(ranks, events, starts))


def _call_of(track: Track, position: int) -> int:
    """The index at which a rank went its way: that of the call of compiled code that issued what differs.

    A call in which the ranks agreed before is not where they part.
    """
    at_ = track.start + position
    step = track.steps[at_]
    since = track.steps[at_ - 1].index + 1 if at_ else 0
    if not step.event.region:
        return step.index
    call = (Kind.CALL, step.event.region, step.event.call)
    between = range(since, step.index)
    events = track.stream.events
    return next((index for index in between if _call(events[index]) == call), step.index)


def _call(event: Event) -> tuple[Kind, str, int]:
    return event.kind, event.name, event.number


def _usual(ways: Sequence[_Way], past: Sequence[Step]) -> tuple[_Way | None, Why]:
    """The ranks that stayed in the common program, and why it is these."""
    if 2 * len(ways[0].ranks) > sum(len(way.ranks) for way in ways):
        return ways[0], Why.MAJORITY
    is_same_event = not differ(way.steps[0].program for way in ways)
    what = _key if is_same_event else _program
    seen = list(map(what, past))
    due = [seen[index] for index in replayed(seen, _AHEAD)]
    fits = [num_equal(list(map(what, way.steps)), due) for way in ways]
    fitting = [way for way, fit in zip(ways, fits, strict=True) if fit and fit == max(fits)]
    if len(fitting) == 1:
        return fitting[0], Why.OWN_PAST
    going_on = [way for way in ways if not way.has_ended]
    if len(going_on) == 1:
        return going_on[0], Why.END
    return None, Why.NONE


def _program(step: Step) -> Hashable:
    return step.program


def _key(step: Step) -> Hashable:
    return step.key


def _due(past: Sequence[Step], usual: _Way | None) -> list[Step]:
    """What comes next in the common program: what the usual ranks did is certain, what follows it is replayed."""
    certain = [step for step in usual.steps if step.event.kind != Kind.END] if usual else []
    if usual and len(certain) < len(usual.steps):
        return certain  # they have ended
    so_far = [*past, *certain]
    return certain + [so_far[index] for index in replayed(list(map(_program, so_far)), _AHEAD)]


def _edit(odd: _Way, due: Sequence[Step], past: Sequence[Step]) -> Edit:
    """What a rank did with the common program: the smallest change after which it goes on as was due."""
    if odd.has_ended:
        return Edit.ENDED
    if due and due[0].program == odd.steps[0].program:
        return Edit.CONTENT
    tail = [step.program for step in odd.steps if step.event.kind != Kind.END]
    program = list(map(_program, due))
    changes = [
        *((Edit.LEFT_OUT, num, program[num:], tail) for num in range(1, len(program))),
        *((Edit.ADDED, num, program, tail[num:]) for num in range(1, len(tail))),
        *((Edit.ADDED, len(again), [*again, *program], tail) for again in _repeated(list(map(_program, past)))),
    ]
    fits = [(_misfit(rest, follows), num, edit) for edit, num, rest, follows in changes if _fit(rest, follows)]
    return min(fits)[2] if fits else Edit.INSTEAD


def _fit(rest: Sequence[Hashable], follows: Sequence[Hashable]) -> int:
    return num_equal(rest, follows)


def _misfit(rest: Sequence[Hashable], follows: Sequence[Hashable]) -> int:
    """How many events do not follow the program."""
    return min(len(rest), len(follows)) - num_equal(rest, follows)


def _repeated(past: Sequence[Hashable]) -> list[Sequence[Hashable]]:
    """The parts that were done at least twice in a row, at the end: a loop may go round once more."""
    lengths = range(1, min(len(past) // 2, _AHEAD) + 1)
    return [past[-length:] for length in lengths if past[-length:] == past[-2 * length : -length]]


def _earlier(ways: Sequence[_Way], past: Sequence[Step]) -> Parting | None:
    """The parting before the first event that all ranks kept, where the longer past of one of them shows it."""
    return None
