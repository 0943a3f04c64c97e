"""Ranks that did not answer, and what the others do -> what became of them, and whose fault it is: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.evidence.byrank import ByRank
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import known
from tpcompile.evidence.several import first, grouped
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding, call_or_collective
from tpcompile.sentinel.habit import surprise
from tpcompile.sentinel.messages import Issued, RankState, place_of
from tpcompile.sentinel.situation import Lost, Situation

_RECENT = 12
"""Collectives before an abort in which a rank may have left the common order."""
_BECAME = {
    "died": (Cause.KILLED, "is gone: its process died"),
    "stopped": (Cause.STOPPED_RESPONDING, "is stopped (SIGSTOP)"),
    "silent": (Cause.STOPPED_RESPONDING, "does not answer"),
}
"""How a rank was lost -> the cause, and what is said of the rank."""


def lost_ranks(situation: Situation) -> Finding | None:
    """What became of ranks that are given up."""
    dead = [gone for gone in situation.lost if gone.is_final]
    if not dead:
        return None
    waiting = situation.now.where(lambda state: state.waits_at or state.in_flight)
    says = _became_of(dead, waiting)
    ranks = tuple(gone.rank for gone in dead)
    cause, _ = _BECAME[dead[0].how]
    aborted = first(gone for gone in dead if gone.has_aborted_in_a_collective)
    if aborted is not None and cause == Cause.KILLED:
        return replace(_aborted(aborted, situation.now, says), gone=ranks)
    return Finding(cause, says, ranks, _first_line(dead, waiting), gone=ranks)


def _became_of(dead: Sequence[Lost], waiting: ByRank[RankState]) -> str:
    says = [f"rank {gone.rank} {_BECAME[gone.how][1]}{gone.where}" for gone in dead]
    if waiting:
        says.append(f"rank {ranks_text(waiting.ranks)} waits")
    return "; ".join(says)


def _first_line(dead: Sequence[Lost], waiting: ByRank[RankState]) -> UserLine | None:
    states: list[Lost | RankState] = [*dead, *waiting.values()]
    return first(known(state.line for state in states))


def _aborted(gone: Lost, states: ByRank[RankState], says: str) -> Finding:
    """A rank left its last stack: it aborted in a collective. The others' collectives tell what was wrong with it."""
    newest = states.found(lambda state: state.blocked_in or state.newest)
    if not newest:
        return Finding(Cause.KILLED, says, (gone.rank,), gone.line)
    there = newest.where(lambda issued: _is_met_by(gone, issued))
    elsewhere = newest.without(there)
    if not elsewhere:
        says += f"; the others issued {newest.first.op} there, too: shapes, dtypes or split sizes differ"
        return Finding(Cause.COLLECTIVE_SIZES, says, (gone.rank,), gone.line)
    strange = elsewhere if there else _left_their_habit(states, newest)
    if strange:
        return _met_with_another(strange, states, says)
    return _left_out(gone, newest.first, states, says)


def _met_with_another(strange: ByRank[Issued], states: ByRank[RankState], says: str) -> Finding:
    """The dead rank did what everybody does, and a rank met it with another collective."""
    issued = strange.first
    cause = call_or_collective(_is_a_call_more(issued, states[strange.ranks[0]]))
    says += f"; rank {ranks_text(strange.ranks)} was in {issued}"
    return Finding(cause, says, strange.ranks, issued.call_line or issued.line)


def _left_out(gone: Lost, met: Issued, states: ByRank[RankState], says: str) -> Finding:
    """The others did what everybody does, and met the dead rank elsewhere."""
    says += f"; the others were in {met}"
    if met.call_line is None or not _is_usual_place(gone, states):
        return Finding(Cause.STUCK_COLLECTIVE, says, (gone.rank,), gone.line)
    says += f", in call {met.call} of {met.region}, which rank {gone.rank} seems to have left out"
    return Finding(Cause.CALL_COUNT, says, (gone.rank,), met.call_line)


def _is_a_call_more(issued: Issued, state: RankState) -> bool:
    """True where no other call of the region was made from that line."""
    in_region = [one for one in state.issued if one.call_line and one.region == issued.region]
    calls = grouped(in_region, lambda one: one.call)
    from_here = {call for call, made in calls.items() if issued.call_line in [one.call_line for one in made]}
    return from_here == {issued.call} and len(calls) > 1


def _is_usual_place(gone: Lost, states: ByRank[RankState]) -> bool:
    """True when ranks usually come to where the dead rank stood: by a call that it left out, it was there too early."""
    of_all = [issued for state in states.values() for issued in state.issued]
    return any(_is_met_by(gone, issued) and _is_at_line_of(gone, issued) for issued in of_all)


def _is_at_line_of(gone: Lost, issued: Issued) -> bool:
    return place_of(gone.stack[-1:]) == place_of(issued.stack[:1])


def _is_met_by(gone: Lost, issued: Issued) -> bool:
    """True when the dead rank stood where this collective was issued, as far as both stacks reach."""
    pairs = list(zip(place_of(gone.stack), issued.place, strict=False))
    return bool(pairs) and all(ours == theirs for ours, theirs in pairs)


def _left_their_habit(states: ByRank[RankState], newest: ByRank[Issued]) -> ByRank[Issued]:
    """Ranks that left their own habit a moment ago, and in what."""
    of_group = {rank: states[rank].issued_in(last.group) for rank, last in newest.items()}
    return ByRank(of_group).found(_strangest)


def _strangest(issued: Sequence[Issued]) -> Issued | None:
    """That of the last collectives which follows most that others followed elsewhere; None where all are usual.

    Elsewhere is before and after: what ends the first step ends the next ones, too.
    """
    keys = [one.key for one in issued]
    places = set(range(1, len(keys)))
    surprises = {place: surprise(keys, place, places - {place}) for place in sorted(places)[-_RECENT:]}
    if _ends_with_something_new(issued):
        last = len(keys) - 1
        surprises[last] = max(surprises[last], 1)
    strangest = max(surprises, key=lambda place: (surprises[place], place), default=0)
    return issued[strangest] if surprises.get(strangest) else None


def _ends_with_something_new(issued: Sequence[Issued]) -> bool:
    """True where the rank is in a collective that it never issued before."""
    *before, last = [one.key for one in issued]
    return len(before) > 1 and last not in before and not issued[-1].is_done
