"""Streams of ranks -> their parting: where each went, what was due, which ranks left the common program: pure.

The ranks agree up to some event. There they part: most of them, or those that go on as all did before, are in the common
program, and what the others did is compared with it. No kind of fault has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.expect import due_after, num_equal, replayed
from tpcompile.evidence.timeline.parting import Edit, Parting, Side, Why
from tpcompile.evidence.timeline.stream import Event, How, Kind, Stream
from tpcompile.evidence.timeline.tracks import (
    Step,
    Track,
    at,
    each_for_itself,
    first_content,
    first_difference,
    in_step,
    is_shifted,
)

_AHEAD = 60
"""Events of the common program that are searched for what an odd rank did; an iteration seldom has more."""


def align(streams: Mapping[int, Stream], domains: Sequence[Collection[int]] = ()) -> Parting | None:
    """The first parting of these ranks; None where none of them did anything that another did not.

    Ranks of different domains (pipeline stages) run different programs and only share what they do in common groups.
    """
    found = None
    for ranks in _compared(streams):
        some = [streams[rank] for rank in ranks]
        is_one_program = not domains or any(set(ranks) <= set(domain) for domain in domains)
        together = in_step(some, is_one_program=is_one_program)
        alone = each_for_itself(some) if is_one_program else ()
        differences = [(together, first_difference(together)), *((tracks, first_content(tracks)) for tracks in alone)]
        for tracks, position in differences:
            parting = _parting_at(position, tracks) if position is not None else None
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


def _parting_at(position: int, tracks: Sequence[Track]) -> Parting:
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
    goes_on = [way for way in ways if what(way.steps[0]) in due_after(seen)]
    if not goes_on:
        goes_on = [way for way in ways if what(way.steps[0]) in seen]
    if len(goes_on) == 1 and not _may_be_over(goes_on[0], ways, past):
        return goes_on[0], Why.OWN_PAST
    going_on = [way for way in ways if not way.has_ended]
    return (going_on[0], Why.END) if len(going_on) == 1 else (None, Why.NONE)


def _may_be_over(usual: _Way, ways: Sequence[_Way], past: Sequence[Step]) -> bool:
    """True where some ranks go round a loop, and what the others do is new and outside of the loop.

    The past of a loop says nothing about how often it goes round before it ends for the first time.
    """
    again = usual.steps[0]
    depth = _depth_of_loop(again.event, past[-1].event)
    if depth is None:
        return False
    ends = [step.event for step, following in pairwise(past) if following.program == again.program]
    lines = [event.stack[depth].line for event in (*ends, past[-1].event) if len(event.stack) > depth]
    seen = {step.program for step in past}
    others = [way.steps[0] for way in ways if way is not usual]
    return all(step.program not in seen and _is_outside(step.event, again.event, depth, max(lines)) for step in others)


def _depth_of_loop(event: Event, before: Event) -> int | None:
    """The depth at which a rank went back to an earlier line from one event to the next; None where it went on."""
    depth = min(num_equal(event.place, before.place), len(event.stack) - 1, len(before.stack) - 1)
    if depth < 0:
        return None
    mine, theirs = event.stack[depth], before.stack[depth]
    is_back = _function(mine) == _function(theirs) and mine.line <= theirs.line
    return depth if is_back else None


def _is_outside(event: Event, first: Event, depth: int, last: int) -> bool:
    """True for an event that is not on the lines of a loop; a rank that finished has left it, one that broke off not."""
    if not event.stack:
        return event.name == How.FINISHED
    if num_equal(event.place, first.place) < depth or len(event.stack) <= depth:
        return True
    mine, loop = event.stack[depth], first.stack[depth]
    return _function(mine) != _function(loop) or not loop.line <= mine.line <= last


def _function(frame: UserLine) -> tuple[str, str]:
    return frame.file, frame.function


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
    if not due:
        return Edit.ADDED  # the other ranks have ended
    if due[0].program == odd.steps[0].program:
        return Edit.CONTENT
    program = list(map(_program, due))
    tail = [step.program for step in odd.steps[:_AHEAD] if step.event.kind != Kind.END]
    repeated = _repeated(list(map(_program, past)))
    changes = [
        *((Edit.LEFT_OUT, program[:num], program[num:], tail) for num in range(1, len(program))),
        *((Edit.ADDED, tail[:num], program, tail[num:]) for num in range(1, len(tail))),
        *((Edit.ADDED, again, [*again, *program], tail) for again in repeated),
    ]
    loops = {step.program for step in (*past, *due, *odd.steps) if step.event.kind == Kind.ITERATION}
    fits = []
    for edit, changed, expected, follows in changes:
        num_fitting = num_equal(expected, follows)
        is_whole = num_fitting == min(len(expected), len(follows))
        # the beginning of an iteration alone is neither left out nor added, what it contains is
        cost = len(changed) + _AHEAD * len(loops.intersection(changed))
        if num_fitting:
            fits.append((not is_whole, 0 if is_whole else -num_fitting, cost, edit))
    if fits:
        return min(fits)[-1]
    is_known = odd.steps[0].program in {step.program for step in past}
    return (
        _edit_by_source(odd.steps[0].event, due[0].event, past[-1].event, is_known=is_known) if past else Edit.INSTEAD
    )


def _edit_by_source(mine: Event, due: Event, before: Event, *, is_known: bool) -> Edit:
    """The edit where an odd rank stopped in something that does not lead back to the program: by the order of lines."""
    if _depth_of_loop(due, before) is not None:
        return Edit.LEFT_OUT if is_known else Edit.INSTEAD  # it left a loop, or did more in its last lines
    if _depth_of_loop(mine, before) is not None:
        return Edit.ADDED
    shared = num_equal(mine.place, due.place)
    own, other = mine.stack[shared : shared + 1], due.stack[shared : shared + 1]
    is_later = own and other and _function(own[0]) == _function(other[0])
    return Edit.LEFT_OUT if is_later and own[0].line > other[0].line else Edit.INSTEAD


def _repeated(past: Sequence[Hashable]) -> list[Sequence[Hashable]]:
    """The parts that were done at least twice in a row, at the end: a loop may go round once more."""
    lengths = range(1, min(len(past) // 2, _AHEAD) + 1)
    return [past[-length:] for length in lengths if past[-length:] == past[-2 * length : -length]]


def _earlier(ways: Sequence[_Way], past: Sequence[Step]) -> Parting | None:
    """The parting before the first event that all ranks kept, where the longer past of one of them shows it."""
    return None
