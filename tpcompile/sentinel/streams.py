"""States of ranks, and of those that are lost -> what each rank did, as streams that can be aligned: pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from tpcompile.evidence.iterables import find, first
from tpcompile.evidence.timeline.stream import Event, How, Kind, Stream
from tpcompile.sentinel.messages import FINISHED, Issued, PointToPoint, RankState
from tpcompile.sentinel.situation import Lost

_P2P = {"send": Kind.SEND, "recv": Kind.RECEIVE}


def streams_of(states: Mapping[int, RankState], lost: Mapping[int, Lost]) -> dict[int, Stream]:
    """The streams of all ranks that are known.

    Of a rank that answers, its flight recorder and what it waits in. Of one that aborted, the stack at which it did: it
    was in the collective in which the others wait for it.
    """
    known = {rank: stream_of(state) for rank, state in states.items()}
    gone = {rank: _of_lost(one, states) for rank, one in lost.items()}
    return known | {rank: stream for rank, stream in gone.items() if stream is not None}


def stream_of(state: RankState) -> Stream:
    """The collectives of one rank in the order in which it issued them, of all groups, and how it stands."""
    groups = {one.group: one for one in reversed(state.issued)}  # the oldest of each group
    cut = [oldest.age_s for oldest in groups.values() if oldest.seq > 1]
    # Before the oldest one that is known of a group it may have issued others, so that the order is not known.
    known = [one for one in state.issued if one.age_s <= min(cut, default=one.age_s)]
    in_order = sorted(known, key=lambda one: -one.age_s)  # stable: collectives of one group are sorted by number
    events = list(chain.from_iterable(map(_with_call, in_order, [None, *in_order])))
    if state.p2p is not None:
        events.append(_point_to_point(state.p2p))
    return Stream(rank=state.rank, events=tuple(events), is_whole=not cut, how=_how(state), groups=state.members)


def _with_call(issued: Issued, before: Issued | None) -> list[Event]:
    """A collective, after the call of the region that issued it if it is the first one of that call."""
    is_first = before is None or (before.region, before.call) != (issued.region, issued.call)
    if not issued.region or not is_first:
        return [event_of(issued)]
    stack = tuple(reversed(issued.stack))
    depth = stack.index(issued.call_line) + 1 if issued.call_line in stack else len(stack)
    call = Event(kind=Kind.CALL, name=issued.region, number=issued.call, stack=stack[:depth])
    return [call, event_of(issued)]


def event_of(issued: Issued) -> Event:
    """A collective as an event."""
    sizes = {"sizes": issued.sizes}
    return Event(
        kind=Kind.COLLECTIVE,
        name=issued.op,
        group=issued.group,
        content={"dtypes": issued.dtypes} | ({} if issued.has_own_sizes else sizes),
        own=sizes if issued.has_own_sizes else {},
        number=issued.seq,
        region=issued.region,
        call=issued.call,
        stack=tuple(reversed(issued.stack)),
        is_done=issued.is_done,
    )


def _point_to_point(p2p: PointToPoint) -> Event:
    stack = (p2p.line,) if p2p.line else ()
    return Event(kind=_P2P[p2p.op], peer=p2p.peer, stack=stack, is_done=False)


def _how(state: RankState) -> How:
    if state.ended == FINISHED or state.phase:
        return How.FINISHED
    if state.ended:
        return How.EXITED if state.ended.startswith("SystemExit") else How.RAISED
    return How.WAITING if state.waits else How.RUNNING


def _of_lost(lost: Lost, states: Mapping[int, RankState]) -> Stream | None:
    """The stream of a rank that died; None where no rank waits for it, or it may live.

    It took part in what has ended on the ranks that wait for it.
    """
    waiting = first(state for state in states.values() if _waits_for(state, lost.rank))
    if waiting is None or lost.how != "died":
        return None
    groups = {name: members for name, members in waiting.members.items() if lost.rank in members}
    fields = {"rank": lost.rank, "groups": groups}
    if lost.aborted and lost.stack and waiting.blocked_in:
        event = _aborted_in(lost, waiting.blocked_in, states)
        return Stream(events=(event,), is_whole=False, how=How.ABORTED, **fields)
    known = stream_of(waiting)
    done = [event for event in known.events if event.group in groups and event.is_done]
    return Stream(events=tuple(done), is_whole=known.is_whole, how=How.KILLED, **fields)


def _aborted_in(lost: Lost, met: Issued, states: Mapping[int, RankState]) -> Event:
    """The collective in which a rank aborted, under the number at which the others wait for it.

    Its op and content are those that another rank issued from the same lines before. Where that is the one in which the
    others wait, its content is not known, but that it is a different one: it aborted there.
    """
    all_issued = [one for state in states.values() for one in state.issued if one.id != met.id]
    like = find(all_issued, lambda one: one.place == lost.place) or met
    event = event_of(like).model_copy(update={"group": met.group, "number": met.seq, "stack": lost.stack})
    is_same_place = met.place == lost.place
    return event.model_copy(update={"is_done": False, "content": {} if is_same_place else event.content})


def _waits_for(state: RankState, rank: int) -> bool:
    waits_in = state.blocked_in
    return waits_in is not None and rank in state.members.get(waits_in.group, ())
