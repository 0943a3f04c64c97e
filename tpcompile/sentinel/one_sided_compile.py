"""Two ranks wait for each other, one of them after a compile -> why the other rank did not compile: pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding, fewer_of, first_finding
from tpcompile.sentinel.messages import Position, RankState
from tpcompile.sentinel.region_lines import called_at, line_in, runs


@dataclass(frozen=True)
class Pair:
    """A rank that waits after a compile, and the rank it waits for."""

    states: ByRank[RankState]
    compiled: RankState
    at: Position
    """Position of its compile."""
    other: RankState
    waits: str
    """What the other rank waits for."""

    @property
    def region(self) -> str:
        """The compiled region."""
        return self.at.region

    @property
    def opening(self) -> str:
        """Start of the text of a finding."""
        return f"rank {self.compiled.rank} compiled {self.at}"


def one_sided_compile(pair: Pair) -> Finding | None:
    """Why only one rank compiled at a position; None when the protocol compares the compiles of both."""
    theirs = pair.other.waits_at
    if theirs is None:
        return first_finding(lambda find: find(pair), _FINDERS)
    return _both_compiled(pair.states, _Held(pair.compiled, pair.at), _Held(pair.other, theirs))


class _Held(NamedTuple):
    """A rank that waits after a compile."""

    state: RankState
    at: Position

    def runs(self, other: _Held) -> bool:
        """True when this rank is inside the function that the other rank compiled."""
        return runs(self.state, other.at.region)


def _both_compiled(states: ByRank[RankState], mine: _Held, theirs: _Held) -> Finding | None:
    """The finding where both ranks wait after different compiles."""
    if _is_compared(mine, theirs) or _is_compared(theirs, mine):
        return None
    orders = [(theirs, mine), (mine, theirs)]
    found = first_finding(lambda order: _part_of(states, *order), orders)
    if found is not None:
        return found
    first, second = mine.state, theirs.state
    says = f"rank {first.rank} compiled {mine.at} first, rank {second.rank} {theirs.at}; both contain collectives"
    return Finding(Cause.ORDER_FORWARD, says, (first.rank, second.rank), second.line or first.line)


def _is_compared(whole: _Held, part: _Held) -> bool:
    """True when the second rank has compiled, or passed, the position of the first: the protocol compares those."""
    region = whole.at.region
    if part.at.region == region:
        return True  # one of them is ahead: it has compiled there, or has passed the position
    has_called = part.state.calls.get(region, 0) >= whole.at.call
    return has_called and part.runs(whole)


def _part_of(states: ByRank[RankState], part: _Held, whole: _Held) -> Finding | None:
    """The finding where one rank compiled a function and the other one only a part of it."""
    if not part.runs(whole):
        return None
    says = (
        f"rank {whole.state.rank} compiled {whole.at}; rank {part.state.rank} runs that function without compiling it, "
        f"and compiled {part.at} inside it"
    )
    ranks = fewer_of(_in_region_of(part.state, states), _in_region_of(whole.state, states))
    return Finding(Cause.REGIONAL_COMPILE, says, ranks, whole.state.program_line or part.state.program_line)


def _in_region_of(one: RankState, states: ByRank[RankState]) -> tuple[int, ...]:
    return states.where(lambda state: _region_of(state) == _region_of(one)).ranks


def _region_of(state: RankState) -> str:
    return state.position.region if state.position is not None else ""


def _while_compiling(pair: Pair) -> Finding | None:
    """The finding where the other rank communicates while it compiles."""
    if not pair.other.compiles:
        return None
    says = f"rank {pair.other.rank} waits {pair.waits} while it compiles; only {pair.opening}"
    return Finding(Cause.STUCK_COLLECTIVE, says, (pair.other.rank,), pair.other.wait_line)


def _recompile_limit(pair: Pair) -> Finding | None:
    """The finding where the other rank is in the same region, after a failed guard."""
    reason = pair.other.reason
    if _region_of(pair.other) != pair.region or not reason:
        return None
    says = f"{pair.opening}; rank {pair.other.rank} did not compile ({reason}) and waits {pair.waits}"
    line = line_in(pair.other, pair.region) or pair.other.wait_line
    return Finding(Cause.RECOMPILE_LIMIT, says, (pair.other.rank,), line)


def _extra_compile(pair: Pair) -> Finding | None:
    """The finding where the other rank is not in that region."""
    if pair.other.position is None or runs(pair.other, pair.region):
        return None
    says = f"only rank {pair.compiled.rank} compiled {pair.at}; rank {pair.other.rank} waits {pair.waits}"
    return Finding(Cause.EXTRA_COMPILE, says, (pair.compiled.rank,), pair.compiled.line)


def _not_compiled(pair: Pair) -> Finding | None:
    """The finding where the other rank runs the function without compiling it."""
    says = f"{pair.opening}; rank {pair.other.rank} did not compile, and waits {pair.waits}"
    line = called_at(pair.other, pair.region) or pair.other.wait_line
    return Finding(Cause.COMPILE_DISABLED, says, (pair.other.rank,), line)


_FINDERS: tuple[Callable[[Pair], Finding | None], ...] = (
    _while_compiling, _recompile_limit, _extra_compile, _not_compiled,
)  # fmt: skip
"""Rules in order, the most specific first."""
