"""States of ranks, and of those that are lost -> what each rank did, as streams that can be aligned.

Pure but for the source of files that this process runs, which shows where a loop ends.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import ModuleType

from tpcompile.evidence.iterables import differ, find, first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.source import loop_around
from tpcompile.evidence.timeline.stream import Event, How, Kind, Stream, TimedStream, place_of
from tpcompile.sentinel.messages import FINISHED, Issued, Message, RankState
from tpcompile.sentinel.situation import Lost
from tpcompile.torch_api import watching

_P2P = {"send": Kind.SEND, "recv": Kind.RECEIVE}


def streams_of(states: Mapping[int, RankState], lost: Mapping[int, Lost]) -> dict[int, Stream]:
    """The streams of all ranks that are known.

    Of a rank that answers, its flight recorder and what it waits in. Of one that aborted, the stack at which it did: it
    was in the collective in which the others wait for it.
    """
    compiled = {one.region for state in states.values() for one in state.issued if one.is_at_first_line}
    known = {rank: stream_of(state, compiled) for rank, state in states.items()}
    gone = {rank: _of_lost(one, states, compiled) for rank, one in lost.items()}
    return known | {rank: stream for rank, stream in gone.items() if stream is not None}


def by_role(stream: Stream) -> Stream:
    """The same with groups by their role: ranks of different domains then issue the same, with sizes of their own."""
    events = [
        event.model_copy(update={"group": _role(event.group), "content": {}, "own": {**event.own, **event.content}})
        for event in stream.events
    ]
    groups = {_role(name): members for name, members in stream.groups.items()}
    return stream.model_copy(update={"events": tuple(events), "groups": groups})


def _role(group: str) -> str:
    """`mesh_tp` of `3 mesh_tp`; a group without a description has a role of its own."""
    _, _, description = group.partition(" ")
    return group if description in ("", "undefined") else description


def stream_of(state: RankState, compiled: Collection[str] = ()) -> Stream:
    """The collectives of one rank in the order in which it issued them, of all groups, and how it stands.

    Compiled code stands at the first line of its function, whatever line of it issues a collective: of regions that are
    `compiled` on some rank the lines inside count on none.
    """
    stream, _ = _stream_and_ages(state, compiled)
    return stream


def timed_stream(state: RankState, now: float) -> TimedStream:
    """The same with the Unix time of each event; `now` is that of the state."""
    stream, ages = _stream_and_ages(state, ())
    return TimedStream(stream=stream, times=tuple(now - age_s for age_s in ages), until=now)


def _stream_and_ages(state: RankState, compiled: Collection[str]) -> tuple[Stream, list[float]]:
    done: list[tuple[float, tuple[str, ...], Event]] = []
    for issued in state.issued:
        done.append((issued.age_s, ("", issued.group), event_of(issued, compiled)))
    for message in state.messages:
        event = _message(message, is_done=not _is_in(state, message))
        done.append((message.age_s, event.sequence, event))
    oldest = {counted: (age_s, event) for age_s, counted, event in reversed(done)}
    cut = [age_s for age_s, event in oldest.values() if event.number > 1]
    # Before the oldest one that is known of a group or peer it may have done others, so that the order is not known.
    known = [one for one in done if one[0] <= min(cut, default=one[0])]
    in_order = sorted(known, key=lambda one: -one[0])  # stable: those of one group are sorted by number
    events: list[Event] = []
    ages: list[float] = []
    before: Event | None = None
    for age_s, _, event in in_order:
        added = _with_call(event, before)
        events += added
        ages += [age_s] * len(added)
        before = event
    if state.p2p is not None and not state.p2p.number:
        stack = (state.p2p.line,) if state.p2p.line else ()
        events.append(Event(kind=_P2P[state.p2p.op], peer=state.p2p.peer, stack=stack, is_done=False))
        ages.append(0.0)
    stream = Stream(
        rank=state.rank, events=tuple(events), is_whole=not cut, how=_how(state), groups=state.members
    )  # fmt: skip
    return stream, ages


def _with_call(issued: Event, before: Event | None) -> list[Event]:
    """A collective, after the call of the region that issued it if it is the first one of that call."""
    is_first = before is None or (before.region, before.call) != (issued.region, issued.call)
    if not issued.region or not is_first:
        return [issued]
    call = Event(kind=Kind.CALL, name=issued.region, number=issued.call, stack=issued.stack[: issued.call_depth])
    return [call, issued]


def event_of(issued: Issued, compiled: Collection[str] = ()) -> Event:
    """A collective as an event."""
    stack = tuple(reversed(issued.stack))
    depth = 0
    if issued.region or issued.call_line:
        depth = stack.index(issued.call_line) + 1 if issued.call_line in stack else len(stack)
    return Event(
        kind=Kind.COLLECTIVE,
        name=issued.op,
        group=issued.group,
        content=issued.common,
        own=issued.own,
        number=issued.seq,
        region=issued.region,
        call=issued.call,
        call_depth=depth,
        stack=stack[:depth] if issued.region in compiled else stack,
        loops=_loops(stack),
        is_done=issued.is_done,
    )


def _loops(stack: Sequence[UserLine]) -> tuple[tuple[int, int], ...]:
    """The loops around each frame; none where this process does not run one of the files: a peer may name any file."""
    is_own = {frame.file for frame in stack} <= _own_files()
    return tuple(loop_around(frame.file, frame.line) for frame in stack) if is_own else ()


def _own_files() -> frozenset[str]:
    """Files of what this process has imported, and of what it runs."""
    running = {
        frame.f_code.co_filename for top in sys._current_frames().values() for frame in watching.frames_from(top)
    }
    return _imported_files() | running


@lru_cache(maxsize=1)
def _imported_files() -> frozenset[str]:
    modules = [module for module in list(sys.modules.values()) if type(module) is ModuleType]
    return frozenset(str(vars(module).get("__file__")) for module in modules)


def _message(message: Message, *, is_done: bool) -> Event:
    return Event(
        kind=_P2P[message.op],
        peer=message.peer,
        number=message.number,
        content=message.content,
        stack=message.stack,
        loops=_loops(message.stack),
        is_done=is_done,
    )


def _is_in(state: RankState, message: Message) -> bool:
    """True for the message that the rank waits in, and those after it of the same op with the same peer."""
    p2p = state.p2p
    return p2p is not None and (p2p.op, p2p.peer) == (message.op, message.peer) and 0 < p2p.number <= message.number


def _how(state: RankState) -> How:
    if state.ended == FINISHED or state.phase:
        return How.FINISHED
    if state.ended:
        return How.EXITED if state.ended.startswith("SystemExit") else How.RAISED
    return How.WAITING if state.waits else How.RUNNING


def _of_lost(lost: Lost, states: Mapping[int, RankState], compiled: Collection[str]) -> Stream | None:
    """The stream of a rank that died; None where no rank waits for it, or it may live.

    It took part in what has ended on the ranks that wait for it.
    """
    waiting = first(state for state in states.values() if _waits_for(state, lost.rank))
    if waiting is None or lost.how != "died":
        return None
    groups = {name: members for name, members in waiting.members.items() if lost.rank in members}
    fields = {"rank": lost.rank, "groups": groups}
    if lost.aborted and lost.stack:
        event = _aborted_in(lost, waiting, states, compiled)
        return Stream(events=(event,), is_whole=False, how=How.ABORTED, **fields)
    known = stream_of(waiting, compiled)
    done = [event for event in known.events if event.group in groups and event.is_done]
    return Stream(events=tuple(done), is_whole=known.is_whole, how=How.KILLED, **fields)


def _aborted_in(lost: Lost, waiting: RankState, states: Mapping[int, RankState], compiled: Collection[str]) -> Event:
    """The collective in which a rank aborted, under the number at which the others wait for it.

    Its op and content are those that another rank issued from the same lines before, or else from the same innermost
    line. Its content is not known where ranks issued different ones there; nor where the others are in the same one,
    but that it does not fit: it aborted there.
    """
    met = _met_by(lost, waiting)
    is_same = all(_is_beside(lost, state) for state in states.values() if _waits_for(state, lost.rank))
    issued = [one for state in states.values() for one in state.issued]
    at_its_lines = met if is_same else find(issued, lambda one: _is_at(lost, one))
    # Where only the innermost line is the same: compiled code that is called from elsewhere.
    end = lost.place[-1:]
    like = at_its_lines or find(issued, lambda one: bool(one.region) and one.place[-1:] == end)
    event = event_of(like or met, compiled)
    stack = event.stack if at_its_lines else lost.stack
    alike = [one for one in issued if like is not None and (one.op, one.place) == (like.op, like.place)]
    is_told = not is_same and not differ(one.what for one in alike)
    inside = {"region": event.region, "call_depth": event.call_depth} if like else {}
    return Event(
        kind=event.kind,
        name=event.name,
        group=met.group,
        number=met.seq,
        content=event.content if is_told else {},
        own=event.own if is_told else {},
        stack=stack,
        loops=_loops(stack),
        is_done=False,
        is_unlike=is_same,
        **inside,
    )


def _is_beside(lost: Lost, waiting: RankState) -> bool:
    """True for a rank in the collective in which the other one aborted, or in the line that waits for it."""
    return _is_at(lost, _met_by(lost, waiting)) or lost.place == place_of(waiting.stack)


def _met_by(lost: Lost, waiting: RankState) -> Issued:
    """What the waiting rank had issued for the collective in which the other one aborted.

    One with sizes of each rank's own completes on a rank once its own sizes match; then it waits in the next one.
    """
    newest, before = waiting.latest, waiting.before_latest
    assert newest is not None, "it waits"
    is_through = before is not None and before.has_own_sizes and _is_at(lost, before) and not _is_at(lost, newest)
    return before if before is not None and is_through else newest


def _is_at(lost: Lost, issued: Issued) -> bool:
    """True when the dead rank was at the lines of this collective, as far as both stacks reach."""
    reach = min(len(lost.place), len(issued.place))
    return reach > 0 and (lost.place[:reach], lost.place[-1]) == (issued.place[:reach], issued.place[-1])


def _waits_for(state: RankState, rank: int) -> bool:
    """True for a rank that waits for the other one, or did: what it was in has failed with the other one's end."""
    latest = state.latest
    return latest is not None and rank in state.members.get(latest.group, ())
