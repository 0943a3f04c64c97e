"""A rank waits for a rank that has left, or lost its connection to it -> where their programs diverged: pure."""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first, last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.messages import FINISHED, RankState
from tpcompile.sentinel.parting import parting
from tpcompile.sentinel.situation import Situation
from tpcompile.sentinel.waits import Wait, waits_of


def waits_for_exited(situation: Situation) -> Finding | None:
    """The finding for a rank that waits for a rank that has left."""
    return first_finding(lambda wait: _of_wait(situation.now, wait), waits_of(situation))


def _of_wait(states: ByRank[RankState], wait: Wait) -> Finding | None:
    here = states[wait.rank]
    absent = states[wait.target]
    if not absent.ended:
        return None
    explained = _explained(states, here, absent) if here.waits_at is None else None
    says = f"rank {wait.rank} waits {wait.what}, and {has_left(absent)}"
    return explained or Finding(Cause.STUCK_COLLECTIVE, says, (wait.target,), here.wait_line)


def lost_to_exited(states: Mapping[int, RankState], here: RankState) -> Finding | None:
    """The finding for failed communication on this rank, if other ranks have left."""
    gone = ByRank(states).without([here.rank]).where(lambda state: state.ended)
    if not gone:
        return None
    explained = _explained(ByRank({**gone, here.rank: here}), here, gone.first)
    if explained is not None:
        return explained
    says = "; ".join(map(has_left, gone.values()))
    issued = here.latest
    if issued is None:
        return Finding(Cause.STUCK_COLLECTIVE, says, gone.ranks, here.line)
    return Finding(Cause.STUCK_COLLECTIVE, f"{says}, and rank {here.rank} is in {issued}", gone.ranks, issued.line)


def has_left(state: RankState) -> str:
    """Text on how a rank ended."""
    return f"rank {state.rank} {state.how_it_ended}"


def _explained(states: ByRank[RankState], waiting: RankState, absent: RankState) -> Finding | None:
    """Why a rank waits for one that has left: earlier collectives differ, or the numbers of calls do."""
    return parting(states) or _fewer_calls(states, waiting, absent) or _fewer_collectives(waiting, absent)


def _fewer_calls(states: ByRank[RankState], waiting: RankState, absent: RankState) -> Finding | None:
    """The finding where the rank that has left made fewer calls, and nothing else differs."""
    region = _region_left_out(waiting, absent)
    if region is None:
        return None
    made = ", ".join(f"rank {rank} {state.calls_of(region)}" for rank, state in states.items())
    observed = f"the ranks made different numbers of calls of {region}: {made}; {has_left(absent)}"
    return Finding(Cause.CALL_COUNT, observed, (absent.rank,), _last_call_of(region, waiting) or waiting.line)


def _region_left_out(waiting: RankState, absent: RankState) -> str | None:
    """A region that the absent rank called less often; preferably the one in which the waiting rank waits."""
    fewer = [region for region, calls in waiting.calls.items() if absent.calls_of(region) < calls]
    newest = last([issued.region for issued in waiting.in_flight])
    return newest if newest in fewer else first(fewer)


def _last_call_of(region: str, state: RankState) -> UserLine | None:
    """The line of the rank's last call of a region, from the collectives of that call."""
    return last(known(issued.call_line for issued in state.issued_by(region)))


def _fewer_collectives(waiting: RankState, absent: RankState) -> Finding | None:
    """The same without known calls: the absent rank finished before the last collective of the waiting rank."""
    newest = waiting.newest
    if newest is None or newest.call_line is None or absent.ended != FINISHED:
        return None
    number = absent.last_number(newest.group)
    if not 0 < number < newest.seq:
        return None
    after = f"after {number} collectives of group {newest.group!r}, before {newest}"
    observed = f"{has_left(absent)} {after}" if absent.phase else f"rank {absent.rank} has left {after}"
    return Finding(Cause.CALL_COUNT, observed, (absent.rank,), newest.call_line)
