"""Stack of a rank that aborted in a collective, states of the remaining ranks -> the rank to blame, if any: pure.

gloo aborts the rank that receives more bytes than it expects, which may be the rank that is right. One rank is blamed
only where most ranks did the same without it, or where a remaining rank repeats steps: these show which of the two
collectives was due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding, call_or_collective
from tpcompile.sentinel.messages import Issued, RankState, place_of
from tpcompile.sentinel.own_sequence import strangest
from tpcompile.sentinel.parted_stacks import Parted, parted_stacks
from tpcompile.sentinel.repeated import Repeated, repeated_before
from tpcompile.sentinel.situation import Lost


@dataclass(frozen=True)
class _Deviation:
    """Where a remaining rank left the common order."""

    issued: Issued
    left_out: Issued | None = None
    """The collective that was due, where the rank has issued both before."""


def aborted_rank(gone: Lost, states: ByRank[RankState], says: str) -> Finding:
    """The finding for a rank that aborted in a collective and left its stack, from the other ranks' collectives."""
    newest = states.found(lambda state: _latest_with(gone, state))
    if not newest:
        if states.found(lambda state: state.latest):
            says += "; it aborted in a collective with ranks of other domains, which are not compared here"
        return Finding(Cause.KILLED, says, (gone.rank,), gone.line)
    there = newest.among(rank for rank in newest if _is_beside(gone, newest[rank], states[rank]))
    elsewhere = newest.without(there)
    if not elsewhere:
        return _unlike_sizes(gone, newest, says)
    if there:
        return _some_elsewhere(gone, newest, elsewhere, states, says)
    return _all_elsewhere(gone, newest, states, says)


def _latest_with(gone: Lost, state: RankState) -> Issued | None:
    """The last collective of a rank; None for one in which the dead rank takes no part."""
    issued = state.latest
    members = state.members.get(issued.group, (gone.rank,)) if issued else ()
    return issued if gone.rank in members else None


def _is_beside(gone: Lost, issued: Issued, state: RankState) -> bool:
    """True for a rank that is in the dead rank's collective, or waits in the same line for one issued before."""
    return _is_met_by(gone, issued) or place_of(state.stack) == gone.place


def _is_met_by(gone: Lost, issued: Issued) -> bool:
    """True when the dead rank was at the line of this collective, as far as both stacks reach."""
    reach = min(len(gone.place), len(issued.place))
    return reach > 0 and gone.place[:reach] == issued.place[:reach]


def _is_at(gone: Lost, issued: Issued) -> bool:
    """The same for the innermost line too: the dead rank was not in a hook below it."""
    return _is_met_by(gone, issued) and gone.place[-1] == issued.place[-1]


def _unlike_sizes(gone: Lost, met: ByRank[Issued], says: str) -> Finding:
    """The finding where the dead rank and the remaining ranks were in the same collective."""
    issued = met.first
    are_alike = not met.first.has_own_sizes and not met.differ(lambda one: one.what)
    odd = (gone.rank,) if are_alike and len(met) > 1 else _all(gone, met)
    if not _is_met_by(gone, issued):
        says += f"; the remaining ranks wait there for {issued}: sizes, dtypes or the order of collectives differ"
        return Finding(Cause.COLLECTIVE_SIZES, says, odd, issued.line)
    says += f"; the remaining ranks issued {issued.op} at the same line: shapes, dtypes or split sizes differ"
    return Finding(Cause.COLLECTIVE_SIZES, says, odd, gone.line)


def _all(gone: Lost, others: ByRank[Issued]) -> tuple[int, ...]:
    return tuple(sorted((gone.rank, *others)))


def _some_elsewhere(
    gone: Lost, newest: ByRank[Issued], elsewhere: ByRank[Issued], states: ByRank[RankState], says: str
) -> Finding:
    """The finding where some of the remaining ranks are in the dead rank's collective, and others are not."""
    strange = _strangest_of(elsewhere, states)
    if not strange and 2 * len(elsewhere) <= len(newest):  # with the dead rank, most are there
        strange = elsewhere
    if not strange:
        return _differ(gone, elsewhere, states, says)
    rank, issued = strange.ranks[0], strange.first
    if _came_round_without(gone, issued, states[rank]):
        says += f"; {named_ranks(strange.ranks)} left out the collective there, and issued {issued}"
        return Finding(Cause.STUCK_COLLECTIVE, says, strange.ranks, gone.line)
    return _deviated(gone, strange.map(_Deviation), states, says)


def _all_elsewhere(gone: Lost, newest: ByRank[Issued], states: ByRank[RankState], says: str) -> Finding:
    """The finding where no remaining rank is in the dead rank's collective."""
    through = _through_with(gone, newest, states)
    if through:
        return _unlike_sizes(gone, through, says)
    if _is_alone(newest, states):
        return _left_out(gone, newest.first, states, says)
    odd = states.among(newest).found(lambda state: _deviation(gone, newest[state.rank], state))
    if odd:
        return _deviated(gone, odd, states, says)
    if all(_is_out_of_turn(gone, issued, states[rank]) for rank, issued in newest.items()):
        return _left_out(gone, newest.first, states, says)
    new = states.among(newest).found(lambda state: _came_to_new_lines(gone, newest[state.rank], state))
    if len(new) == len(newest):
        return _added(gone, newest, new.first, says)
    return _differ(gone, newest, states, says)


def _is_alone(newest: ByRank[Issued], states: ByRank[RankState]) -> bool:
    """True when several remaining ranks did the same, in the same order, and only the dead rank did not."""
    if len(newest) < 2 or newest.differ(lambda issued: issued.place):
        return False
    return len(_strangest_of(newest, states)) in (0, len(newest))


def _through_with(gone: Lost, newest: ByRank[Issued], states: ByRank[RankState]) -> ByRank[Issued] | None:
    """The collectives in which the dead rank aborted, if the remaining ranks completed them; else None.

    Only for collectives with sizes per rank, which complete on a rank once its own sizes match.
    """
    before = states.found(lambda state: state.before_latest)
    here = before.where(lambda issued: issued.has_own_sizes and _is_met_by(gone, issued))
    return here if here and here.ranks == newest.ranks else None


def _strangest_of(newest: ByRank[Issued], states: ByRank[RankState]) -> ByRank[Issued]:
    """Ranks that recently deviated from their own sequence -> the collective in which they did."""
    of_group = {rank: states[rank].issued_in(last.group) for rank, last in newest.items()}
    return ByRank(of_group).found(strangest)


def _deviation(gone: Lost, newest: Issued, state: RankState) -> _Deviation | None:
    """Where a rank broke off its repeated steps, if the dead rank went on with them; else None."""
    issued = state.issued_in(newest.group)
    strange = strangest(issued)
    if strange is None:
        return None
    index = issued.index(strange)
    since = range(index, issued.index(newest) + 1)
    steps = [one for one in repeated_before(issued, index) if _goes_on(gone, one, since)]
    if not steps:
        return None
    is_new = strange.place not in [one.place for one in issued[:index]]
    if is_new or _is_a_call_more(strange, state):
        return _Deviation(strange)
    if _is_end_of_loop(gone, newest, issued):
        return None
    return first(_Deviation(strange, one.due(index)) for one in steps if one.has(strange))


def _goes_on(gone: Lost, steps: Repeated, indices: range) -> bool:
    return any(_is_at(gone, steps.due(index)) for index in indices)


def _is_out_of_turn(gone: Lost, newest: Issued, state: RankState) -> bool:
    """True when the rank goes on with its repeated steps, and the dead rank was in a different collective of them."""
    issued = state.issued_in(newest.group)
    index = issued.index(newest)
    steps = [one for one in repeated_before(issued, index) if one.due(index).place == newest.place]
    return any(_has(gone, one) for one in steps) and not _is_end_of_loop(gone, newest, issued)


def _came_to_new_lines(gone: Lost, newest: Issued, state: RankState) -> Parted | None:
    """Where the dead rank left the repeated steps with which a rank goes on, for lines of its own; else None."""
    parted = parted_stacks(gone, newest, state)
    is_new = parted is not None and parted.is_own_new
    return parted if is_new and _goes_on_with_steps(newest, state) else None


def _goes_on_with_steps(newest: Issued, state: RankState) -> bool:
    issued = state.issued_in(newest.group)
    steps = repeated_before(issued, issued.index(newest))
    return newest.place in [one.due(one.end).place for one in steps]


def _is_end_of_loop(gone: Lost, newest: Issued, issued: Sequence[Issued]) -> bool:
    """True when one rank repeats a part once more, and the other goes on: how often may depend on the data."""
    parts = repeated_before(issued, issued.index(newest))
    return any(part.has(newest) != _has(gone, part) for part in parts)


def _has(gone: Lost, steps: Repeated) -> bool:
    return any(_is_at(gone, one) for one in steps.step)


def _deviated(gone: Lost, odd: ByRank[_Deviation], states: ByRank[RankState], says: str) -> Finding:
    """The finding that blames remaining ranks."""
    issued, left_out = odd.first.issued, odd.first.left_out
    state = states[odd.ranks[0]]
    who = named_ranks(odd.ranks)
    if left_out is not None and _is_at(gone, left_out):
        says += f"; {who} left out the collective there, which it issued in earlier steps, and issued {issued}"
        return Finding(Cause.STUCK_COLLECTIVE, says, odd.ranks, _line_of_parting(gone, issued, state))
    says += f"; {who} issued {issued}"
    cause = call_or_collective(_is_a_call_more(issued, state))
    return Finding(cause, says, odd.ranks, issued.call_line or issued.line)


def _left_out(gone: Lost, met: Issued, states: ByRank[RankState], says: str) -> Finding:
    """The finding that blames the dead rank: it was at a different line than the remaining ranks."""
    says += f"; the remaining ranks issued {met}"
    has_skipped = met.call_line is not None and _is_usual_place(gone, states)
    otherwise = Finding(Cause.STUCK_COLLECTIVE, says, (gone.rank,), gone.line)
    return _skipped(gone, met, says) if has_skipped else otherwise


def _skipped(gone: Lost, met: Issued, says: str) -> Finding:
    says += f", in call {met.call} of {met.region}, which rank {gone.rank} appears to have skipped"
    return Finding(Cause.CALL_COUNT, says, (gone.rank,), met.call_line)


def _added(gone: Lost, others: ByRank[Issued], parted: Parted, says: str) -> Finding:
    """The finding that blames the dead rank: as `parting` does, for a collective that no other rank issues."""
    says += f", from {parted.line}, from which no other rank issues a collective"
    says += f"; the remaining ranks issued {others.first} as in earlier steps"
    return Finding(call_or_collective(parted.is_of_calls), says, (gone.rank,), parted.line)


def _differ(gone: Lost, elsewhere: ByRank[Issued], states: ByRank[RankState], says: str) -> Finding:
    """The finding where it is not known which of the ranks left the common order."""
    rank, issued = elsewhere.ranks[0], elsewhere.first
    says += "".join(f"; rank {other} issued {theirs}" for other, theirs in elsewhere.items())
    parted = parted_stacks(gone, issued, states[rank])
    cause = call_or_collective(parted and parted.is_of_calls)
    if parted and parted.is_of_calls:
        says += f"; the calls are made at {parted.own} on rank {gone.rank} and at {parted.other} on rank {rank}"
    return Finding(cause, says, _all(gone, elsewhere), parted.line if parted else gone.line)


def _line_of_parting(gone: Lost, issued: Issued, state: RankState) -> UserLine | None:
    parted = parted_stacks(gone, issued, state)
    return parted.own if parted else gone.line


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
    return any(_is_at(gone, issued) for state in states.values() for issued in state.issued)
