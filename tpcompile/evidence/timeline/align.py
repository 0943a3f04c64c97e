"""Streams of ranks -> their parting: where each went, what was due, which ranks left the common program: pure.

The ranks agree up to some event. There they part: most of them, or those that go on as all did before, are in the
common program, and what the others did is compared with it. No kind of fault has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from tpcompile.evidence.iterables import last
from tpcompile.evidence.timeline.edit import AHEAD, due_steps, edit_of
from tpcompile.evidence.timeline.expect import due_after, replayed
from tpcompile.evidence.timeline.parting import Edit, Parting, Side, Why
from tpcompile.evidence.timeline.stream import Event, Kind, Stream, ends_of
from tpcompile.evidence.timeline.tracks import (
    Step,
    Track,
    each_for_itself,
    first_content,
    first_difference,
    have_own_places,
    in_step,
    parted_earlier,
)
from tpcompile.evidence.timeline.usual import majority, usual_way
from tpcompile.evidence.timeline.ways import Way, common_past, ways_at


def align(streams: Mapping[int, Stream], domains: Sequence[Collection[int]] = ()) -> Parting | None:
    """The first parting of these ranks; None where none of them did anything that another did not.

    Ranks of different domains (pipeline stages) run different programs and only share what they do in common groups; so
    do ranks with roles of their own, such as a learner and its actors.
    """
    found = None
    for ranks in _compared(streams):
        some = [streams[rank] for rank in ranks]
        is_one_domain = not domains or any(set(ranks) <= set(domain) for domain in domains)
        is_one_program = is_one_domain and not have_own_places(some)
        for parting in _partings(some, is_one_program=is_one_program):
            if found is None or _precedes(parting, found):
                found = parting
    return found


def left_out_alone(streams: Mapping[int, Stream]) -> Parting | None:
    """Where one rank waits for what another one was due to do, and did not: the own past of that one shows it.

    For ranks that are stuck and have nothing else in common, as stages of a pipeline. None where several ranks may be
    the one.
    """
    found: list[Parting] = []
    for waiting, stream in permutations(streams.values(), 2):
        awaited = last([event for event in waiting.events if not event.is_done])
        if awaited is None or not _is_due_from(stream, awaited, waiting):
            continue
        parting = _left_out(stream, awaited, waiting)
        if parting is not None:
            found.append(parting)
    odd = {parting.odd for parting in found}
    return found[0] if len(odd) == 1 else None


def _is_due_from(stream: Stream, awaited: Event, waiting: Stream) -> bool:
    """True for a rank without which that event does not end, and that has not come to it."""
    if awaited.peer is not None and awaited.peer != stream.rank:
        return False
    members = waiting.groups.get(awaited.group, ()) if awaited.peer is None else (awaited.peer,)
    met = max((event.number for event in stream.events if _is_same(event, stream, awaited, waiting)), default=0)
    return stream.rank in members and met < awaited.number


def _is_same(event: Event, stream: Stream, awaited: Event, waiting: Stream) -> bool:
    ends = ends_of(awaited, waiting.rank)
    return event.sequence == awaited.sequence if ends is None else ends_of(event, stream.rank) == ends


def _left_out(stream: Stream, awaited: Event, waiting: Stream) -> Parting | None:
    """The last place at which the own past of a rank leads to that event, and it did something else."""
    events = stream.events
    programs = [(event.kind, event.name, event.group, event.peer, event.place) for event in events]
    wanted = {what for what, event in zip(programs, events, strict=True) if _is_same(event, stream, awaited, waiting)}
    for at in range(len(events) - 1, max(0, len(events) - AHEAD), -1):
        due = due_after(programs[:at])
        if due and due <= wanted and programs[at] not in wanted:
            own = last([event for event, what in zip(events[:at], programs, strict=False) if what in due])
            index = waiting.events.index(awaited)
            sides = (
                Side((waiting.rank,), waiting.events[index:], (index,), awaited),
                Side((stream.rank,), events[at:], (at,), events[at]),
            )
            due_here = (own,) if own is not None else ()
            return Parting(events[at - 1], sides, due_here, Edit.LEFT_OUT, (stream.rank,), Why.OWN_PAST)
    return None


def _partings(streams: Sequence[Stream], *, is_one_program: bool) -> Iterator[Parting]:
    """Where these ranks part in what they do together, and where content differs of what each does for itself."""
    together = in_step(streams, is_one_program=is_one_program)
    position = first_difference(together)
    if position is not None:
        yield _parting_at(position, together)
    for tracks in each_for_itself(streams) if is_one_program else ():
        position = first_content(tracks)
        if position is not None:
            parting = _parting_at(position, tracks)
            # not the last call of that region, but what the rank did before this one
            rank, start = next(iter(parting.starts.items()))
            events = next(stream.events for stream in streams if stream.rank == rank)
            yield replace(parting, before=last(events[:start]))


def _compared(streams: Mapping[int, Stream]) -> list[tuple[int, ...]]:
    """All ranks, those of each process group, and each two that send; the most first: fewer have more in common."""
    sets = [set(streams)]
    for rank, stream in streams.items():
        sets += [set(members) for members in stream.groups.values()]
        peers = {event.peer for event in stream.events if event.peer is not None}
        sets += [{rank, peer} for peer in peers]
    known = {tuple(sorted(ranks & streams.keys())) for ranks in sets}
    return sorted((ranks for ranks in known if len(ranks) > 1), key=lambda ranks: (-len(ranks), ranks))


def _precedes(one: Parting, other: Parting) -> bool:
    """True when a rank of both parted earlier in the first."""
    mine, theirs = one.starts, other.starts
    return any(mine[rank] < theirs[rank] for rank in mine.keys() & theirs.keys())


def _parting_at(position: int, tracks: Sequence[Track]) -> Parting:
    ways = ways_at(tracks, position)
    if parted_earlier(tracks, position):
        most = majority(ways)
        why = Why.MAJORITY if most else Why.NONE
        return replace(_parting(ways, most, [], why), before=None, edit=Edit.UNDECIDED)
    usual, why = usual_way(ways)
    earlier = _left_earlier(ways) if why != Why.MAJORITY else None
    if earlier is not None:
        if usual is None:
            return earlier
        if usual.ranks == earlier.odd:
            usual, why = None, Why.NONE  # it goes on as before, and may have left the program before that
    return _parting(ways, usual, due_steps(common_past(ways), usual), why)


def _parting(ways: Sequence[Way], usual: Way | None, due: Sequence[Step], why: Why) -> Parting:
    others = [way for way in ways if way is not usual]
    past = common_past(ways)
    return Parting(
        before=past[-1].event if past else None,
        sides=tuple(way.side for way in ways),
        due=tuple(_end_of(others[0], step) for step in due),
        edit=edit_of(others[0], due, past) if usual else Edit.UNDECIDED,
        odd=tuple(sorted(rank for way in others for rank in way.ranks)) if usual else (),
        why=why,
    )


def _end_of(odd: Way, due: Step) -> Event:
    """What was due, of a message the odd rank's own end, as it did it before."""
    if due.event.peer is None:
        return due.event
    before = odd.stream.events[: odd.first.index]
    own = [event for event in before if due.program == (Kind.SEND, ends_of(event, odd.ranks[0]))]
    return last(own) or due.event


def _left_earlier(ways: Sequence[Way]) -> Parting | None:
    """The parting where a rank left the program before it met one of which only the last event is known.

    The own past of the first shows it: from there on the program leads to what the other one is in.
    """
    known = [way for way in ways if way.past and len(way.ranks) == 1]
    unknown = [way for way in ways if not way.past]
    if len(ways) != 2 or not known or not unknown or known[0].first.program == unknown[0].first.program:
        return None
    odd, usual = known[0], unknown[0]
    did = [*odd.past, *odd.steps]
    programs = [step.program for step in did]
    met = len(odd.past)
    for left in range(met - 1, max(0, met - AHEAD), -1):
        due = replayed(programs[:left], met - left + 1)
        leads_there = due and programs[due[-1]] == usual.first.program
        if leads_there and due_after(programs[:left]) == {programs[due[0]]} != {programs[left]}:
            start = did[left].index
            side = Side(odd.ranks, odd.stream.events[start:], (start,), did[left].event)
            way = replace(odd, steps=tuple(did[left:]), past=tuple(did[:left]), side=side)
            return _parting([way, usual], usual, [did[index] for index in due], Why.OWN_PAST)
    return None
