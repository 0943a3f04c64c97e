"""Ranks that did not answer, states of the remaining ranks -> how they were lost, and the rank to blame: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding, call_or_collective
from tpcompile.sentinel.history import issued_by_all
from tpcompile.sentinel.messages import Issued, RankState
from tpcompile.sentinel.own_sequence import surprise
from tpcompile.sentinel.situation import Lost, Situation

_RECENT = 12
"""Last collectives before an abort that are searched for a deviation from the common order."""


def lost_ranks(situation: Situation) -> Finding | None:
    """The finding for ranks that are given up."""
    dead = situation.lost.where(lambda gone: gone.is_final)
    if not dead:
        return None
    found = _found(dead, situation.now)
    return replace(found, gone=dead.ranks)


def _found(dead: ByRank[Lost], states: ByRank[RankState]) -> Finding:
    waiting = states.where(lambda state: state.waits_at or state.in_flight)
    says = "; ".join(map(str, dead.values()))
    if waiting:
        says += f"; waiting: {named_ranks(waiting.ranks)}"
    aborted = dead.where(lambda gone: gone.aborted).where(_line)
    cause = dead.first.cause
    if aborted and cause == Cause.KILLED:
        return _aborted(aborted.first, states, says)
    lines = [*dead.found(_line).values(), *waiting.found(_line).values()]
    return Finding(cause, says, dead.ranks, first(lines))


def _line(one: Lost | RankState) -> UserLine | None:
    return one.line


def _aborted(gone: Lost, states: ByRank[RankState], says: str) -> Finding:
    """The finding for a rank that aborted in a collective and left its stack, from the other ranks' collectives."""
    newest = states.found(lambda state: state.latest)
    if not newest:
        return Finding(Cause.KILLED, says, (gone.rank,), gone.line)
    there = newest.where(lambda issued: _is_met_by(gone, issued))
    elsewhere = newest.without(there)
    if not elsewhere:
        return _unlike_sizes(gone, newest.first, says)
    strange = _deviating(states, elsewhere) or (elsewhere if there else None)
    if strange:
        return _remaining_deviate(gone, strange, states, says)
    through = _through_with(gone, newest, states)
    if through is not None:
        return _unlike_sizes(gone, through, says)
    return _left_out(gone, newest.first, states, says)


def _unlike_sizes(gone: Lost, met: Issued, says: str) -> Finding:
    """The finding where the dead rank and the remaining ranks were in the same collective."""
    says += f"; the remaining ranks issued {met.op} at the same line: shapes, dtypes or split sizes differ"
    return Finding(Cause.COLLECTIVE_SIZES, says, (gone.rank,), gone.line)


def _through_with(gone: Lost, newest: ByRank[Issued], states: ByRank[RankState]) -> Issued | None:
    """The collective in which the dead rank aborted, if the remaining ranks completed it; else None.

    Only for collectives with sizes per rank, which complete on a rank once its own sizes match. For all others, the
    dead rank is assumed to have skipped the collectives in between.
    """
    before = states.found(lambda state: state.before_latest)
    here = before.where(lambda issued: issued.has_own_sizes and _is_met_by(gone, issued))
    return here.first if here and here.ranks == newest.ranks else None


def _remaining_deviate(gone: Lost, strange: ByRank[Issued], states: ByRank[RankState], says: str) -> Finding:
    """The finding that blames remaining ranks: they issued a different collective than the dead rank."""
    issued = strange.first
    if _came_round_without(gone, issued, states[strange.ranks[0]]):
        says += f"; {named_ranks(strange.ranks)} left out the collective there, and issued {issued}"
        return Finding(Cause.STUCK_COLLECTIVE, says, strange.ranks, gone.line)
    cause = call_or_collective(_is_a_call_more(issued, states[strange.ranks[0]]))
    says += f"; {named_ranks(strange.ranks)} issued {issued}"
    return Finding(cause, says, strange.ranks, issued.call_line or issued.line)


def _left_out(gone: Lost, met: Issued, states: ByRank[RankState], says: str) -> Finding:
    """The finding that blames the dead rank: it was at a different line than the remaining ranks."""
    says += f"; the remaining ranks issued {met}"
    if met.call_line is None or not _is_usual_place(gone, states):
        return Finding(Cause.STUCK_COLLECTIVE, says, (gone.rank,), gone.line)
    says += f", in call {met.call} of {met.region}, which rank {gone.rank} appears to have skipped"
    return Finding(Cause.CALL_COUNT, says, (gone.rank,), met.call_line)


def _came_round_without(gone: Lost, issued: Issued, state: RankState) -> bool:
    """True when the rank is where it was before, and never issued a collective where the dead rank was."""
    earlier = [one for one in state.issued if one.seq != issued.seq]
    is_back = (issued.call_line or issued.line) in [one.call_line or one.line for one in earlier]
    return is_back and not any(_is_met_by(gone, one) for one in earlier)


def _is_a_call_more(issued: Issued, state: RankState) -> bool:
    """True when the region was called before, but never from that line."""
    others = [one.call_line for one in state.issued_by(issued.region) if one.call != issued.call]
    return bool(others) and issued.call_line not in others


def _is_usual_place(gone: Lost, states: ByRank[RankState]) -> bool:
    """True when other ranks issue collectives at the dead rank's line: it got there early, since it skipped a call."""
    met = [issued for issued in issued_by_all(states) if _is_met_by(gone, issued)]
    return gone.place[-1] in [issued.place[-1] for issued in met]


def _is_met_by(gone: Lost, issued: Issued) -> bool:
    """True when the dead rank was at the line of this collective, as far as both stacks reach."""
    reach = min(len(gone.place), len(issued.place))
    return reach > 0 and gone.place[:reach] == issued.place[:reach]


def _deviating(states: ByRank[RankState], newest: ByRank[Issued]) -> ByRank[Issued]:
    """Ranks that recently deviated from their own sequence -> the collective in which they did."""
    of_group = {rank: states[rank].issued_in(last.group) for rank, last in newest.items()}
    return ByRank(of_group).found(_strangest)


def _strangest(issued: Sequence[Issued]) -> Issued | None:
    """The most unusual of the last collectives; None when all are usual.

    It is compared with earlier and later places: what ends the first step also ends the later ones.
    """
    keys = [one.key for one in issued]
    places = range(1, len(keys))
    surprises = {place: surprise(keys, place, {*places} - {place}) for place in places[-_RECENT:]}
    if _ends_with_something_new(issued):
        last = places[-1]
        surprises[last] = max(surprises[last], 1)
    strangest = max(surprises, key=lambda place: (surprises[place], place), default=0)
    return issued[strangest] if surprises.get(strangest) else None


def _ends_with_something_new(issued: Sequence[Issued]) -> bool:
    """True when the rank is in a collective that it never issued before."""
    *before, last = [one.key for one in issued]
    return len(before) > 1 and last not in before and not issued[-1].is_done
