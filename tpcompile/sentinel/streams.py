"""States of ranks, and of those that are lost -> what each rank did, as streams that can be aligned: pure."""

from __future__ import annotations

from collections.abc import Mapping

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
    gone = {rank: _last_of(one, states) for rank, one in lost.items()}
    return known | {rank: stream for rank, stream in gone.items() if stream is not None}


def stream_of(state: RankState) -> Stream:
    """The collectives of one rank in the order in which it issued them, of all groups, and how it stands."""
    groups = {one.group: one for one in reversed(state.issued)}  # the oldest of each group
    cut = [oldest.age_s for oldest in groups.values() if oldest.seq > 1]
    # Before the oldest one that is known of a group it may have issued others, so that the order is not known.
    known = [one for one in state.issued if one.age_s <= min(cut, default=one.age_s)]
    in_order = sorted(known, key=lambda one: -one.age_s)  # stable: collectives of one group are sorted by number
    events = [event_of(one) for one in in_order]
    if state.p2p is not None:
        events.append(_point_to_point(state.p2p))
    return Stream(rank=state.rank, events=tuple(events), is_whole=not cut, how=_how(state), groups=state.members)


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
    return Event(kind=_P2P[p2p.op], own={"peer": str(p2p.peer)}, stack=stack, is_done=False)


def _how(state: RankState) -> How:
    if state.ended == FINISHED or state.phase:
        return How.FINISHED
    if state.ended:
        return How.EXITED if state.ended.startswith("SystemExit") else How.RAISED
    return How.WAITING if state.waits else How.RUNNING


def _last_of(lost: Lost, states: Mapping[int, RankState]) -> Stream | None:
    """The stream of a lost rank: a collective at its last line, under the number at which the others wait for it.

    Its op and content are those of a collective that another rank issued from the same lines, else of the one that
    the others wait in: that they are equal is not known, and where it died tells more.
    """
    if not lost.aborted or not lost.stack:
        return None
    waiting = [state for state in states.values() if _waits_for(state, lost.rank)]
    met = first(state.blocked_in for state in waiting if state.blocked_in)
    if met is None:
        return None
    all_issued = [one for state in states.values() for one in state.issued if one.id != met.id]
    like = find(all_issued, lambda one: one.place == lost.place) or met
    event = event_of(like.model_copy(update={"seq": met.seq, "group": met.group, "is_done": False}))
    groups = {name: members for name, members in waiting[0].members.items() if lost.rank in members}
    events = (event.model_copy(update={"stack": lost.stack}),)
    return Stream(rank=lost.rank, events=events, is_whole=False, how=How.ABORTED, groups=groups)


def _waits_for(state: RankState, rank: int) -> bool:
    waits_in = state.blocked_in
    return waits_in is not None and rank in state.members.get(waits_in.group, ())
