"""A check that ends a run early + the state of every rank -> the rank that the others wait for: pure.

The rules are those of the sentinel. There a rank that runs the user's own code may still arrive; here the time it had
for that is over.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Check, CheckId
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.call_numbers import Calls, uneven_call
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.describe import describe
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.hang import why_stuck
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.situation import Lost, Situation
from tpcompile.sentinel.waits import waits_of

_WAITS = (CheckId.ARRIVED, CheckId.TIMED_OUT, CheckId.MOVING)
"""Checks of a wait that lasted too long."""
_STUCK_S = 3.0
"""A rank that has waited for less is not stuck: every collective waits for the last rank."""


def is_of_wait(check: Check) -> bool:
    """True for a check that one rank fails because of what another one does."""
    return check.id in (*_WAITS, CheckId.ALIVE) or check.cause == Cause.COMMUNICATION


def explained(
    check: Check, states: ByRank[RankState], lost: Mapping[int, Lost], calls: Mapping[int, Calls]
) -> tuple[Check, ...]:
    """The check, after the one that it follows from where the states, or the calls of the phase, show that."""
    # Ranks that have waited for a while stand for an earlier round.
    stuck = states.where(lambda state: state.blocked_in is None or state.blocked_in.age_s >= _STUCK_S)
    found = uneven_call(calls, states) or _why(check, Situation(states, before=stuck, lost=ByRank(lost)))
    if found is None:
        return (_located(check, states),)
    cause = finding_check(found).changed(mode=check.mode)
    return cause, check.changed(is_consequence=True)


def _why(check: Check, situation: Situation) -> Finding | None:
    found = why_stuck(situation)
    if check.id == CheckId.ALIVE:
        # The launcher may have stopped ranks that progress; of a rank that was killed, the check says as much.
        return found if found is not None and found.gone and found.cause != Cause.KILLED else None
    return found or _late(situation)


def _late(situation: Situation) -> Finding | None:
    """The ranks that others wait for, and that wait for none themselves."""
    waits = waits_of(situation)
    waiting = {wait.rank for wait in waits}
    last = [wait for wait in waits if wait.target not in waiting]
    if not last:
        return None
    ranks = tuple(sorted({wait.target for wait in last}))
    late = situation.now.among(ranks)
    texts = dict.fromkeys(f"rank {wait.rank} waits {wait.what}" for wait in last)
    says = "; ".join([*map(describe, late.values()), *texts])
    return Finding(Cause.NEVER_ARRIVED, says, ranks, first(known(state.program_line for state in late.values())))


def _located(check: Check, states: ByRank[RankState]) -> Check:
    """A check on a wait, with the line of the first rank that is waited for; of any rank where it names none."""
    if check.id not in _WAITS or check.line is not None:
        return check
    named = states.where(lambda state: state.rank in check.ranks) if check.ranks else states
    return check.changed(line=first(known(state.program_line for state in named.values())))
