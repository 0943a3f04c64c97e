"""A rank waits for a rank that has left, or lost its connection to it -> where their programs diverged: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.messages import FINISHED, RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.situation import Situation
from tpcompile.sentinel.waits import Wait, waits_of


def waits_for_exited(situation: Situation) -> Finding | None:
    """The finding for a rank that waits for a rank that has left."""
    return first_finding(lambda wait: _of_wait(situation.now, wait), waits_of(situation))


def _of_wait(states: ByRank[RankState], wait: Wait) -> Finding | None:
    here, absent = states[wait.rank], states[wait.target]
    if not absent.ended:
        return None
    says = f"rank {wait.rank} waits {wait.what}, and {has_left(absent)}"
    explained = parted(states) if here.waits_at is None else None
    if explained is not None:
        return replace(explained, observed=f"{explained.observed}; {says}")
    return Finding(Cause.STUCK_COLLECTIVE, says, (wait.target,), here.wait_line)


def lost_to_exited(states: Mapping[int, RankState], here: RankState) -> Finding | None:
    """The finding for failed communication on this rank, if other ranks have left."""
    gone = ByRank(states).without([here.rank]).where(lambda state: state.ended)
    if not gone:
        return None
    says = "; ".join(map(has_left, gone.values()))
    explained = parted({**gone, here.rank: here})
    if explained is not None:
        # what a rank left out is said, and of one that has finished there is no more to say
        failed = [has_left(one) for rank, one in gone.items() if one.ended != FINISHED or rank not in explained.ranks]
        return replace(explained, observed="; ".join([explained.observed, *failed]))
    issued = here.latest
    if issued is None:
        return Finding(Cause.STUCK_COLLECTIVE, says, gone.ranks, here.line)
    return Finding(Cause.STUCK_COLLECTIVE, f"{says}, and rank {here.rank} is in {issued}", gone.ranks, issued.line)


def has_left(state: RankState) -> str:
    """Text on how a rank ended."""
    return f"rank {state.rank} {state.how_it_ended}"
