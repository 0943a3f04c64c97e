"""State of a rank -> one line of text on what it does: pure."""

from __future__ import annotations

from datetime import UTC, datetime

from tpcompile.evidence.records.base import at_text
from tpcompile.sentinel.messages import COMPILES, COMPILING, RankState


def clock_text(unix_s: float, *, for_s: float) -> str:
    """`21:40:03 UTC (62 s)`: a time of this host, and how long ago it was."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S} UTC ({for_s:.0f} s)"


def describe(state: RankState) -> str:
    """One line on what a rank does."""
    return f"rank {state.rank} {_does(state)}"


def _does(state: RankState) -> str:
    where = at_text(state.line)
    if state.ended:
        return state.how_it_ended
    if state.waits_at is not None:
        return f"compiled {state.waits_at} and has waited {state.since_s:.1f} s for the other ranks{where}"
    if state.compiles:
        return f"{_compiles(state)}{where}"
    if state.p2p is not None:
        return f"waits in {state.p2p}"
    stuck = state.blocked_in if state.blocked else None
    return f"has waited {stuck.age_s:.1f} s in {stuck}" if stuck else f"is {state.activity}{where}"


def _compiles(state: RankState) -> str:
    of_region = f" of {state.position.region}" if state.position else ""
    why = f" because {state.reason}" if state.reason else ""
    if state.activity not in COMPILES:  # Dynamo has not begun the compile yet, or it has ended
        return f"is {COMPILING} a frame{of_region}{why}"
    return f"has been {state.activity} {state.compile_id}{of_region} for {state.since_s:.1f} s{why}"
