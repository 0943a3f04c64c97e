"""Two ranks wait for each other, one with what it has compiled -> why the other one did not compile that: pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpcompile.evidence.byrank import ByRank
from tpcompile.evidence.causes import Cause
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.messages import Position, RankState
from tpcompile.sentinel.regionlines import called_at, line_in, runs


@dataclass(frozen=True)
class Pair:
    """A rank that holds what it compiled, and the one that it waits for."""

    states: ByRank[RankState]
    compiled: RankState
    at: Position
    """What it compiled."""
    other: RankState
    waits: str
    """In what the other rank waits."""

    @property
    def region(self) -> str:
        """What was compiled, on one rank."""
        return self.at.region

    @property
    def opening(self) -> str:
        """How a finding about them begins."""
        return f"rank {self.compiled.rank} compiled {self.at}"

    def about_other(self, cause: Cause, observed: str) -> Finding:
        """The other rank is to blame, where it waits."""
        return Finding(cause, observed, (self.other.rank,), self.other.wait_line)


def one_compiled(pair: Pair) -> Finding | None:
    """Why one rank alone compiled there; None where both did, or will be seen to: then comparing that says more."""
    if _is_compared(pair.compiled, pair.other) or _is_compared(pair.other, pair.compiled):
        return None
    return first_finding(lambda find: find(pair), _FINDERS)


def _is_compared(whole: RankState, part: RankState) -> bool:
    """True when one rank waits with what it compiled, and the other has compiled there before it went on inside."""
    if whole.waits_at is None or part.waits_at is None:
        return False
    region, call = whole.waits_at.region, whole.waits_at.call
    if part.waits_at.region == region:
        return True  # one of them is ahead: it has compiled, or is seen to have gone past
    return part.calls.get(region, 0) >= call and runs(part, region)


def _whole_and_part(pair: Pair) -> Finding | None:
    """One rank runs without compiling what the other compiled, and compiled a part of it."""
    orders = [(pair.other, pair.compiled), (pair.compiled, pair.other)]
    return first_finding(lambda order: _part_of(pair.states, *order), orders)


def _part_of(states: ByRank[RankState], part: RankState, whole: RankState) -> Finding | None:
    if part.waits_at is None or whole.waits_at is None or not runs(part, whole.waits_at.region):
        return None
    says = (
        f"rank {whole.rank} compiled {whole.waits_at}; rank {part.rank} runs that function without compiling it, "
        f"and compiled {part.waits_at} inside of it"
    )
    return Finding(Cause.REGIONAL_COMPILE, says, _fewer(states, part, whole), whole.line or part.line)


def _fewer(states: ByRank[RankState], a: RankState, b: RankState) -> tuple[int, ...]:
    """The ranks in the region that fewer of them are in; all of both where there is no majority."""
    sides = [_in_region_of(one, states) for one in (a, b)]
    fewer, more = sorted(sides, key=len)
    return fewer if len(fewer) < len(more) else tuple(sorted([*fewer, *more]))


def _in_region_of(one: RankState, states: ByRank[RankState]) -> tuple[int, ...]:
    return states.where(lambda state: _region_of(state) == _region_of(one)).ranks


def _region_of(state: RankState) -> str:
    return state.position.region if state.position is not None else ""


def _other_order(pair: Pair) -> Finding | None:
    """Both hold what they compiled, and it is not the same."""
    theirs = pair.other.waits_at
    if theirs is None:
        return None
    says = f"{pair.opening} first, rank {pair.other.rank} {theirs}; both hold collectives"
    ranks = pair.compiled.rank, pair.other.rank
    return Finding(Cause.ORDER_FORWARD, says, ranks, pair.other.line or pair.compiled.line)


def _while_compiling(pair: Pair) -> Finding | None:
    """The other one communicates while it compiles."""
    if not pair.other.compiles:
        return None
    says = f"rank {pair.other.rank} waits {pair.waits} while it compiles; {pair.opening} without it"
    return pair.about_other(Cause.STUCK_COLLECTIVE, says)


def _recompile_limit(pair: Pair) -> Finding | None:
    """The other one is in that region too, and a guard failed there."""
    reason = pair.other.reason
    if _region_of(pair.other) != pair.region or not reason:
        return None
    says = f"{pair.opening}; rank {pair.other.rank} did not compile: {reason}, and waits {pair.waits}"
    line = line_in(pair.other, pair.region) or pair.other.wait_line
    return Finding(Cause.RECOMPILE_LIMIT, says, (pair.other.rank,), line)


def _extra_compile(pair: Pair) -> Finding | None:
    """The other one is elsewhere."""
    if pair.other.position is None or runs(pair.other, pair.region):
        return None
    says = f"rank {pair.compiled.rank} alone compiled {pair.at}; rank {pair.other.rank} waits {pair.waits}"
    return Finding(Cause.EXTRA_COMPILE, says, (pair.compiled.rank,), pair.compiled.line)


def _not_compiled(pair: Pair) -> Finding | None:
    """The other one runs that function as it is."""
    says = f"{pair.opening}; rank {pair.other.rank} did not compile, and waits {pair.waits}"
    line = called_at(pair.other, pair.region) or pair.other.wait_line
    return Finding(Cause.COMPILE_DISABLED, says, (pair.other.rank,), line)


_FINDERS: tuple[Callable[[Pair], Finding | None], ...] = (
    _whole_and_part, _other_order, _while_compiling, _recompile_limit, _extra_compile, _not_compiled,
)  # fmt: skip
"""From what says most to what is left."""
