"""Seed -> a drawn loop program with a fault on one rank, what each rank did until the job stood still, and the truth.

Programs have nested functions and loops, compiled regions, two groups of all ranks and one of some, branches of every
k-th step and of the first steps, calls and collectives of some ranks alone. Faults are of many kinds (faults.py). Ranks
run in lockstep, or some collectives ahead, and all of it is seen, or the last N events of each rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.evidence.timeline.drawing import drawn_program, groups_of, number_lines
from tests.evidence.timeline.faults import KINDS, Fault, Planting
from tests.evidence.timeline.program import Line, Run
from tests.evidence.timeline.standstill import Job, Stood
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.stream import Event, How, Kind, Stream

_MOST_EVENTS = 1500
_ENDS = {"finished": How.FINISHED, "raised": How.RAISED, "exited": How.EXITED, "killed": How.KILLED}


@dataclass
class World:
    """A job that stands still, or that was looked at while it was healthy."""

    seed: int
    fault: str
    """Empty for a healthy job."""
    odd: int
    lines: frozenset[int]
    """Lines that a person accepts as the place of the fault, without knowing which lines were executed."""
    branch: int
    """Line of the branch or loop that decided it; 0 where no executed line differs."""
    streams: dict[int, Stream]
    flows: dict[int, list[Line]]
    """For every rank the lines that it executed until then, in order."""
    marks: dict[int, list[int]]
    """For every rank and each event of its stream the number of lines executed by then, its own line included."""
    parted_at: int
    """Event of the odd rank's stream at which it parted; negative where its stream begins later."""


def healthy_world(seed: int) -> World:
    """A job without a fault, at some moment."""
    draw = random.Random(seed)
    num_ranks = draw.choice((2, 2, 3, 4))
    drawing, program = drawn_program(draw, num_ranks)
    number_lines(drawing, program)
    runs = {rank: Run(rank, is_odd=False).run(program) for rank in range(num_ranks)}
    limit = draw.randint(1, 1 + max(len(run.events) for run in runs.values()))
    job = Job({rank: run.events for rank, run in runs.items()}, groups_of(num_ranks), ahead=draw.choice((0, 3)))
    job.run(limit)
    return _world(seed, runs, job, last=_kept(draw))


def faulty_world(seed: int, *, kind: str = "", num_ranks: int = 0) -> World:
    """A job whose program goes wrong on one rank, such that it stands still."""
    draw = random.Random(seed)
    kind = kind or draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    while True:  # not every program has a place for every kind, and some faults are silent
        found = _attempt(seed, draw, kind=kind, num_ranks=num_ranks or draw.choice((2, 2, 3, 4)))
        if found is not None:
            return found


def _attempt(seed: int, draw: random.Random, *, kind: str, num_ranks: int) -> World | None:
    drawing, program = drawn_program(draw, num_ranks)
    fault = KINDS[kind][1](Planting(drawing, program, draw))
    if fault is None:
        return None
    number_lines(drawing, program)
    odd = draw.randrange(num_ranks)
    runs = {rank: Run(rank, is_odd=rank == odd).run(program) for rank in range(num_ranks)}
    usual = Run(odd, is_odd=False).run(program)
    parted = _parting(usual, runs[odd])
    if parted is None or max(len(run.events) for run in runs.values()) > _MOST_EVENTS:
        return None
    job = Job({rank: run.events for rank, run in runs.items()}, groups_of(num_ranks), ahead=draw.choice((0, 0, 3)))
    job.run(_MOST_EVENTS + 1)
    usual_at, parted_at = parted
    if not any(job.pending.values()) or job.at[odd] < parted_at:
        return None  # nothing stands still: it is silent
    world = _world(seed, runs, job, last=_kept(draw), aborts=job.ahead == 0 and draw.random() < 0.6)
    world.fault, world.odd, world.branch = kind, odd, fault.branch.line if fault.branch else 0
    world.lines = _accepted(fault, (usual, usual_at), (runs[odd], parted_at))
    world.parted_at += parted_at
    return world


def _kept(draw: random.Random) -> int:
    """The number of events that each rank's ring keeps."""
    return draw.choice((_MOST_EVENTS, _MOST_EVENTS, draw.randint(20, 120)))


def _world(seed: int, runs: Mapping[int, Run], job: Job, *, last: int, aborts: bool = False) -> World:
    stood = job.result({rank: _ENDS[run.how] for rank, run in runs.items()})
    unequal = job.unequal() if aborts else None
    if unequal is not None:
        _abort(stood, job, unequal, raises=seed % 2 == 0)
    numbers = {rank: range(max(0, one.num_events - last), one.num_events) for rank, one in stood.items()}
    groups = groups_of(len(runs))
    streams = {rank: _stream(rank, runs[rank], stood[rank], numbers[rank], groups) for rank in runs}
    marks = {rank: runs[rank].marks[kept.start : kept.stop] for rank, kept in numbers.items()}
    flows = {
        rank: run.flow if stood[rank].how in _ENDS.values() else run.flow[: marks[rank][-1]]
        for rank, run in runs.items()
    }
    return World(seed, "", -1, frozenset(), 0, streams, flows, marks, -numbers[0].start)


def _abort(stood: Mapping[int, Stood], job: Job, met: tuple[str, int], *, raises: bool) -> None:
    """What gloo does where content is unequal: the rank with the smaller one ends, the connection breaks for others."""
    there = {rank: one for rank, one in stood.items() if met in one.waits_in}
    smallest = min(there, key=lambda rank: (sorted(job.begun[rank][met].content.items()), rank))
    for rank, one in there.items():
        if rank == smallest:
            one.how = How.ABORTED
        elif raises:
            one.how = How.RAISED


def _stream(rank: int, run: Run, stood: Stood, kept: range, groups: Mapping[str, tuple[int, ...]]) -> Stream:
    events = [_seen(run.events[index], stood) for index in kept]
    own = {name: members for name, members in groups.items() if rank in members}
    return Stream(rank=rank, events=tuple(events), is_whole=kept.start == 0, how=stood.how, groups=own)


def _seen(event: Event, stood: Stood) -> Event:
    is_pending = event.kind == Kind.COLLECTIVE and (event.group, event.number) in stood.waits_in
    return event.model_copy(update={"is_done": False}) if is_pending else event


def _parting(usual: Run, odd: Run) -> tuple[int, int] | None:
    """The first events that the fault changes, of those that other ranks can know: of the healthy and the odd run."""
    kept = [[index for index, event in enumerate(run.events) if not _is_local(event)] for run in (usual, odd)]
    for mine, theirs in zip(*kept, strict=False):
        if _what(usual.events[mine]) != _what(odd.events[theirs]):
            return mine, theirs
    mine_num, theirs_num = len(kept[0]), len(kept[1])
    if mine_num == theirs_num:
        return None
    if mine_num > theirs_num:
        return kept[0][theirs_num], len(odd.events)
    return len(usual.events), kept[1][mine_num]


def _is_local(event: Event) -> bool:
    return event.kind == Kind.CALL and event.name.startswith("local")


def _what(event: Event) -> tuple[object, ...]:
    return event.kind, event.name, event.group, event.place, sorted(event.content.items())


def _accepted(fault: Fault, usual: tuple[Run, int], odd: tuple[Run, int]) -> frozenset[int]:
    """The branch, and the lines below its function that lead to what shows the fault.

    The frame at which the stacks part is accepted as well where it is further out: a call of which nothing is seen and
    a call that was not made are the same to events.
    """
    lines = {one.line for one in (fault.branch, *fault.more) if one is not None}
    run, at = odd
    before = run.events[at - 1].stack
    stacks = [run.events[at].stack if at < len(run.events) else () for run, at in (usual, odd)]
    for shows, stack, other in (("healthy", *stacks), ("odd", *stacks[::-1])):
        if fault.shows not in (shows, "both"):
            continue
        depths = [depth for depth, frame in enumerate(stack) if frame.function == fault.function]
        parted = max(_num_shared(stack, other), _num_shared(stack, before))
        lines |= {frame.line for frame in stack[depths[-1] if depths else parted :]}
        lines |= {frame.line for frame in stack[parted : parted + 1]}
    return frozenset(lines)


def _num_shared(stack: Sequence[UserLine], other: Sequence[UserLine]) -> int:
    pairs = list(zip(stack, other, strict=False))
    return next((depth for depth, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
