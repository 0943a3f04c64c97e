"""States of all ranks -> why nothing moves, or None while somebody may still come: pure, no store, no clock.

Nothing here is decided by how long a rank takes. A rank that compiles or runs the user's own code may come, and its
peers wait. A verdict needs a rank that cannot come: it is gone, it has left, it issued another collective under the
same number, or it waits itself for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.lost import Lost, lost_ranks
from tpcompile.sentinel.messages import Issued, RankState
from tpcompile.sentinel.othergroup import other_group
from tpcompile.sentinel.parting import fewer_calls, parting
from tpcompile.sentinel.progress import COMPILES, COMPILING
from tpcompile.sentinel.waits import (
    called_at,
    compiles,
    last_issued,
    line_in,
    runs,
    stuck_in,
    stuck_line,
    stuck_since,
    waits_for,
)


def judge(
    states: Mapping[int, RankState],
    lost: Sequence[Lost],
    *,
    before: Mapping[int, RankState],
    beside: Mapping[int, RankState] = MappingProxyType({}),
) -> Finding | None:
    """The reason nothing moves. `before` are the states of the round before: a rank is stuck when it did not move.

    `beside` are ranks of other domains: of those counts only what they issued in a group that these are stuck in.
    """
    details = tuple(describe(state) for _, state in sorted(states.items()))
    dead = [gone for gone in lost if gone.is_final]
    if dead:
        return replace(lost_ranks(dead, states), details=details)
    mismatch = _mismatch(states, before, beside)
    if mismatch is not None:
        return replace(mismatch, details=details)
    for find in (_left, other_group, _cycle, _crossed):
        found = find(states, before)
        if found is not None:
            return replace(found, details=details)
    return None


def calls_parted(here: RankState, theirs: RankState) -> Finding | None:
    """The call that one of two ranks made or left out before one of them compiled alone."""
    found = parting({here.rank: here, theirs.rank: theirs})
    return found if found is not None and found.cause == Cause.CALL_COUNT else None


def describe(state: RankState) -> str:
    """One line on what a rank does."""
    where = f" at {state.line}" if state.line else ""
    if state.ended:
        return f"rank {state.rank} has left: {state.ended}"
    if state.waits_at is not None:
        return f"rank {state.rank} compiled {state.waits_at} and has waited {state.since_s:.1f} s for the others{where}"
    if compiles(state):
        why = f" because {state.reason}" if state.reason else ""
        what = f"{state.compile_id} of {state.position.region}" if state.position else state.compile_id
        doing = state.activity if state.activity in COMPILES else COMPILING
        return f"rank {state.rank} has been {doing} {what} for {state.since_s:.1f} s{why}{where}"
    stuck = stuck_in(state)
    if state.p2p is not None:
        return f"rank {state.rank} waits in {state.p2p}"
    if stuck is not None and state.blocked:
        return f"rank {state.rank} has waited {stuck.age_s:.1f} s in {stuck}"
    return f"rank {state.rank} is {state.activity}{where}"


def departed(states: Mapping[int, RankState], here: RankState) -> Finding | None:
    """Communication failed on this rank: because others have left the job?"""
    gone = [state for _, state in sorted(states.items()) if state.ended and state.rank != here.rank]
    if not gone:
        return None
    others = {state.rank: state for state in gone}
    explained = _explained({**others, here.rank: here}, here, gone[0])
    if explained is not None:
        return explained
    who = "; ".join(f"rank {state.rank} has left: {state.ended}" for state in gone)
    last = stuck_in(here) or last_issued(here)
    what = f", and rank {here.rank} is in {last}" if last else ""
    line = last.line if last else here.line
    return Finding(Cause.STUCK_COLLECTIVE, who + what, tuple(state.rank for state in gone), line)


def _mismatch(
    states: Mapping[int, RankState], before: Mapping[int, RankState], beside: Mapping[int, RankState]
) -> Finding | None:
    """Ranks issued different collectives under one number of one group, and some rank is stuck at or behind it."""
    stuck = {found.group for state in states.values() if (found := stuck_since(state, before)) is not None}
    everybody = {**beside, **states}
    for group in sorted(stuck):
        for have in _numbers(everybody, group):
            alike = _alike({rank: issued.what for rank, issued in have.items()})
            if len(alike) > 1:
                return parting(_only(everybody, group)) or _differ(alike, have)
    return None


def _only(states: Mapping[int, RankState], group: str) -> dict[int, RankState]:
    """The states, with the collectives of one group."""
    found = {}
    for rank, state in states.items():
        kept = tuple(issued for issued in state.issued if issued.group == group)
        found[rank] = state.model_copy(update={"issued": kept})
    return found


def _numbers(states: Mapping[int, RankState], group: str) -> Iterator[dict[int, Issued]]:
    """What the ranks issued under each number of a group, where more than one did."""
    by_rank = {rank: {i.seq: i for i in s.issued if i.group == group} for rank, s in states.items()}
    for seq in sorted({seq for issued in by_rank.values() for seq in issued}):
        have = {rank: issued[seq] for rank, issued in by_rank.items() if seq in issued}
        if len(have) > 1:
            yield have


def _alike(have: Mapping[int, str]) -> list[list[int]]:
    """Ranks by equal text, the most first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(have.items()):
        groups.setdefault(text, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _differ(alike: Sequence[Sequence[int]], have: Mapping[int, Issued]) -> Finding:
    odd = tuple(sorted(rank for ranks in alike[1:] for rank in ranks))
    says = " against ".join(f"rank {ranks_text(ranks)} {have[ranks[0]]}" for ranks in alike)
    return Finding(Cause.STUCK_COLLECTIVE, f"the ranks are in different collectives: {says}", odd, have[odd[0]].line)


def _left(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """A rank waits for one that has left."""
    for waiting, target, what in waits_for(states, before):
        if states[target].ended:
            here = states[waiting]
            explained = _explained(states, here, states[target]) if here.waits_at is None else None
            left = f"rank {waiting} waits {what}, and rank {target} has left: {states[target].ended}"
            return explained or Finding(Cause.STUCK_COLLECTIVE, left, (target,), stuck_line(here))
    return None


def _explained(states: Mapping[int, RankState], waiting: RankState, absent: RankState) -> Finding | None:
    """Why a rank waits for one that has left: they parted before, or made different numbers of calls."""
    came_apart = parting(states)
    if came_apart is not None:
        return came_apart
    return fewer_calls(states, waiting, absent)


def _cycle(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """Two ranks wait for each other."""
    pairs = {(waiting, target): what for waiting, target, what in waits_for(states, before)}
    for (a, b), what in sorted(pairs.items()):
        if (b, a) not in pairs:
            continue
        compiled = next((r for r in (a, b) if states[r].waits_at is not None), None)
        if compiled is not None:
            other = b if compiled == a else a
            if _is_compared(states[compiled], states[other]) or _is_compared(states[other], states[compiled]):
                continue  # what they compiled there says more, as soon as the last rank has compiled it
            return _one_compiled(states, compiled, other, pairs[other, compiled])
        says = f"rank {a} waits {what}; rank {b} waits {pairs[b, a]}"
        alone = next((r for r in (a, b) if states[r].p2p is not None), None)
        if alone is not None:
            p2p = states[alone].p2p
            assert p2p is not None
            return Finding(Cause.STUCK_COLLECTIVE, says, (p2p.peer,), p2p.line)
        return parting(states) or Finding(Cause.STUCK_COLLECTIVE, says, (a, b), states[a].line)
    return None


def _crossed(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """Two ranks have issued collectives of two groups in opposite order, and each GPU waits in its first one."""
    stuck = {rank: found for rank, state in states.items() if (found := stuck_since(state, before)) is not None}
    for a, first in sorted(stuck.items()):
        for b, second in sorted(stuck.items()):
            theirs, ours = _find(states[b], first), _find(states[a], second)
            if not (a < b and first.group != second.group and theirs and ours) or theirs.is_done or ours.is_done:
                continue
            if _everybody_issued(first, states) and _everybody_issued(second, states):
                says = f"rank {a} issued {first} before {ours}; rank {b} issued them in opposite order"
                return Finding(Cause.STUCK_COLLECTIVE, says, (a, b), second.line)
    return None


def _everybody_issued(wanted: Issued, states: Mapping[int, RankState]) -> bool:
    """False while a rank of the group may still come."""
    return all(_find(state, wanted) for state in states.values() if wanted.group in state.groups)


def _find(state: RankState, wanted: Issued) -> Issued | None:
    return next((i for i in state.issued if (i.group, i.seq) == (wanted.group, wanted.seq)), None)


def _one_compiled(states: Mapping[int, RankState], compiled: int, other: int, what: str) -> Finding:
    """One rank compiled code with collectives and waits for the other, which waits for it in a collective."""
    theirs, ours = states[other], states[compiled]
    assert ours.waits_at is not None
    if theirs.waits_at is not None:
        return _whole_and_part(states, theirs, ours) or Finding(
            Cause.ORDER_FORWARD,
            f"rank {compiled} compiled {ours.waits_at} first, rank {other} {theirs.waits_at}; both hold collectives",
            (compiled, other),
            theirs.line or ours.line,
        )
    line = stuck_line(theirs)
    region = ours.waits_at.region
    runs_at = line_in(theirs, region) or line
    if compiles(theirs):
        text = f"rank {other} waits {what} while it compiles; rank {compiled} compiled {ours.waits_at} without it"
        return Finding(Cause.STUCK_COLLECTIVE, text, (other,), line)
    if theirs.position is not None and theirs.position.region == region and theirs.reason:
        text = (
            f"rank {compiled} compiled {ours.waits_at}; rank {other} did not compile: {theirs.reason}, and waits {what}"
        )
        return Finding(Cause.RECOMPILE_LIMIT, text, (other,), runs_at)
    if theirs.position is not None and not runs(theirs, region):
        text = f"rank {compiled} alone compiled {ours.waits_at}; rank {other} waits {what}"
        return Finding(Cause.EXTRA_COMPILE, text, (compiled,), ours.line)
    text = f"rank {compiled} compiled {ours.waits_at}; rank {other} did not compile, and waits {what}"
    return Finding(Cause.COMPILE_DISABLED, text, (other,), called_at(theirs, region) or line)


def _is_compared(whole: RankState, part: RankState) -> bool:
    """True when one rank waits with what it compiled, and the other has compiled there before it went on inside."""
    if whole.waits_at is None or part.waits_at is None:
        return False
    if part.waits_at.region == whole.waits_at.region:
        return True  # one of them is ahead: it has compiled, or is seen to have gone past
    region, call = whole.waits_at.region, whole.waits_at.call
    return part.calls.get(region, 0) >= call and runs(part, region)


def _whole_and_part(states: Mapping[int, RankState], a: RankState, b: RankState) -> Finding | None:
    """One rank runs without compiling what the other compiled, and compiled a part of it; None where neither does."""
    pairs = [(a, b), (b, a)]
    for part, whole in pairs:
        assert part.waits_at is not None
        assert whole.waits_at is not None
        if not runs(part, whole.waits_at.region):
            continue
        says = (
            f"rank {whole.rank} compiled {whole.waits_at}; rank {part.rank} runs that function without compiling it, "
            f"and compiled {part.waits_at} inside of it"
        )
        return Finding(Cause.REGIONAL_COMPILE, says, _fewer(states, part, whole), whole.line or part.line)
    return None


def _fewer(states: Mapping[int, RankState], a: RankState, b: RankState) -> tuple[int, ...]:
    """The ranks in the region that fewer of them are in; all of both where there is no majority."""
    sides = [[rank for rank, state in sorted(states.items()) if _region_of(state) == _region_of(one)] for one in (a, b)]
    fewer, more = sorted(sides, key=len)
    return tuple(sorted([*fewer, *more])) if len(fewer) == len(more) else tuple(fewer)


def _region_of(state: RankState) -> str:
    return state.position.region if state.position is not None else ""
