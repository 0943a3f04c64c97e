"""States of all ranks -> why nothing moves, or None while somebody may still come: pure, no store, no clock.

Nothing here is decided by how long a rank takes. A rank that compiles or runs the user's own code may come, and its
peers wait. A verdict needs a rank that cannot come: it is gone, it has left, it issued another collective under the
same number, or it waits itself for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import UserLine
from tpcompile.sentinel.clock import COMPILES, COMPILING
from tpcompile.sentinel.messages import Issued, RankState


@dataclass(frozen=True)
class Finding:
    """What is wrong, in the terms of a check."""

    cause: Cause
    observed: str
    ranks: tuple[int, ...]
    """Ranks to blame."""
    line: UserLine | None = None
    details: tuple[str, ...] = ()
    gone: tuple[int, ...] = ()
    """Ranks that cannot take part any more."""

    @property
    def is_loss(self) -> bool:
        """A process is gone or does not answer."""
        return self.cause in (Cause.KILLED, Cause.STOPPED_RESPONDING)


@dataclass(frozen=True)
class Lost:
    """A rank that did not answer."""

    rank: int
    how: str
    """`died`, `stopped` (SIGSTOP) or `silent`."""
    seen: str = ""
    line: UserLine | None = None
    """Where its main thread was, when it left a black box."""
    is_final: bool = False
    """It died, or has been stopped or silent for too long."""


def judge(states: Mapping[int, RankState], lost: Sequence[Lost], *, before: Mapping[int, RankState]) -> Finding | None:
    """The reason nothing moves. `before` are the states of the round before: a rank is stuck when it did not move."""
    details = tuple(describe(state) for _, state in sorted(states.items()))
    dead = [gone for gone in lost if gone.is_final]
    if dead:
        return _lost(dead, states, details)
    for find in (_mismatch, _left, _cycle):
        found = find(states, before)
        if found is not None:
            return replace(found, details=details)
    return None


def describe(state: RankState) -> str:
    """One line on what a rank does."""
    where = f" at {state.line}" if state.line else ""
    if state.ended:
        return f"rank {state.rank} has left: {state.ended}"
    if state.waits_at is not None:
        return f"rank {state.rank} compiled {state.waits_at} and has waited {state.since_s:.1f} s for the others{where}"
    if state.activity in COMPILES or state.in_dynamo:
        why = f" because {state.reason}" if state.reason else ""
        what = f"{state.compile_id} of {state.position.region}" if state.position else state.compile_id
        doing = state.activity if state.activity in COMPILES else COMPILING
        return f"rank {state.rank} has been {doing} {what} for {state.since_s:.1f} s{why}{where}"
    stuck = _stuck(state)
    if stuck is not None and state.blocked:
        return f"rank {state.rank} has waited {stuck.age_s:.1f} s in {stuck}"
    return f"rank {state.rank} is {state.activity}{where}"


def _lost(dead: Sequence[Lost], states: Mapping[int, RankState], details: tuple[str, ...]) -> Finding:
    how = "; ".join(f"rank {g.rank} {_HOW[g.how]}{_where(g)}" for g in dead)
    waits = [s for s in states.values() if _stuck(s) is not None or s.waits_at is not None]
    waiting = f"; rank {ranks_text([s.rank for s in waits])} waits" if waits else ""
    aborted = next((g.line for g in dead if g.line), None)
    line = aborted or next((s.line for s in waits if s.line), None)
    ranks = tuple(gone.rank for gone in dead)
    return Finding(_cause_of_loss(dead[0], states), f"{how}{waiting}", ranks, line, details, gone=ranks)


def _where(gone: Lost) -> str:
    return f" in {gone.line}" if gone.line else f" ({gone.seen})" if gone.seen else ""


def _cause_of_loss(gone: Lost, states: Mapping[int, RankState]) -> Cause:
    """A rank that aborted at another line than the one its peers communicate at was in another collective."""
    if gone.how != "died":
        return Cause.STOPPED_RESPONDING
    elsewhere = [i.line for s in states.values() if (i := _stuck(s) or _last(s)) is not None and i.line]
    is_other = gone.line is not None and elsewhere and not any(_same(gone.line, line) for line in elsewhere)
    return Cause.STUCK_COLLECTIVE if is_other else Cause.KILLED


def _same(a: UserLine, b: UserLine) -> bool:
    return (a.file, a.line) == (b.file, b.line)


def _last(state: RankState) -> Issued | None:
    return state.issued[-1] if state.issued else None


_HOW = {"died": "is gone: its process died", "stopped": "is stopped (SIGSTOP)", "silent": "does not answer"}


def departed(states: Mapping[int, RankState], here: RankState) -> Finding | None:
    """Communication failed on this rank: because others have left the job?"""
    gone = [state for _, state in sorted(states.items()) if state.ended and state.rank != here.rank]
    if not gone:
        return None
    who = "; ".join(f"rank {state.rank} has left: {state.ended}" for state in gone)
    last = _stuck(here) or _last(here)
    what = f", and rank {here.rank} is in {last}" if last else ""
    line = last.line if last else here.line
    return Finding(Cause.STUCK_COLLECTIVE, who + what, tuple(state.rank for state in gone), line)


def _mismatch(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """Ranks issued different collectives under one number of one group, and some rank is stuck at or behind it."""
    stuck = {found.group for state in states.values() if (found := _stuck_since(state, before)) is not None}
    for group in sorted(stuck):
        by_rank = {rank: {i.seq: i for i in s.issued if i.group == group} for rank, s in states.items() if s.issued}
        by_rank = {rank: issued for rank, issued in by_rank.items() if issued}
        for seq in sorted({seq for issued in by_rank.values() for seq in issued}):
            have = {rank: issued[seq] for rank, issued in by_rank.items() if seq in issued}
            alike = _alike(have)
            if len(have) > 1 and len(alike) > 1:
                return _differ(alike, have)
    return None


def _alike(have: Mapping[int, Issued]) -> list[list[int]]:
    """Ranks by equal collective from the same line, the most first."""
    groups: dict[str, list[int]] = {}
    for rank, issued in sorted(have.items()):
        line = f"{issued.line.file}:{issued.line.line}" if issued.line else ""
        groups.setdefault(f"{issued.what} {line}", []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _differ(alike: Sequence[Sequence[int]], have: Mapping[int, Issued]) -> Finding:
    odd = tuple(sorted(rank for ranks in alike[1:] for rank in ranks))
    says = " against ".join(f"rank {ranks_text(ranks)} {have[ranks[0]]}" for ranks in alike)
    return Finding(Cause.STUCK_COLLECTIVE, f"the ranks are in different collectives: {says}", odd, have[odd[0]].line)


def _left(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """A rank waits for one that has left."""
    for waiting, target, what in _waits(states, before):
        if states[target].ended:
            return Finding(
                Cause.STUCK_COLLECTIVE,
                f"rank {waiting} waits {what}, and rank {target} has left: {states[target].ended}",
                (target,),
                states[waiting].line,
            )
    return None


def _cycle(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """Two ranks wait for each other."""
    waits = {(waiting, target): what for waiting, target, what in _waits(states, before)}
    for (a, b), what in sorted(waits.items()):
        if (b, a) not in waits:
            continue
        compiled = next((r for r in (a, b) if states[r].waits_at is not None), None)
        if compiled is None:
            return Finding(
                Cause.STUCK_COLLECTIVE, f"rank {a} waits {what}; rank {b} waits {waits[b, a]}", (a, b), states[a].line
            )
        other = b if compiled == a else a
        return _ran_without_compiling(states, compiled, other, waits[other, compiled])
    return None


def _ran_without_compiling(states: Mapping[int, RankState], compiled: int, other: int, what: str) -> Finding:
    theirs, ours = states[other], states[compiled]
    if theirs.waits_at is not None:
        return Finding(
            Cause.ORDER_FORWARD,
            f"rank {compiled} compiled {ours.waits_at} first, rank {other} {theirs.waits_at}; both hold collectives",
            (compiled, other),
            theirs.line or ours.line,
        )
    same = theirs.position is not None and ours.waits_at is not None and theirs.position.region == ours.waits_at.region
    limit = same and theirs.reason
    stuck = _stuck(theirs)
    cause = Cause.RECOMPILE_LIMIT if limit else Cause.COMPILE_DISABLED
    why = f": {theirs.reason}" if limit else ""
    return Finding(
        cause,
        f"rank {compiled} compiled {ours.waits_at}; rank {other} did not compile{why}, and waits {what}",
        (other,),
        stuck.line if stuck and stuck.line else theirs.line,
    )


def _waits(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Iterator[tuple[int, int, str]]:
    """(rank, rank it waits for, in what): only waits that cannot end unless the other rank moves."""
    for rank, state in sorted(states.items()):
        if state.waits_at is not None:
            for other, theirs in sorted(states.items()):
                if other != rank and theirs.waits_at != state.waits_at:
                    yield rank, other, f"for it at {state.waits_at}"
            continue
        stuck = _stuck_since(state, before)
        if stuck is None:
            continue
        for other, theirs in sorted(states.items()):
            last = max((i.seq for i in theirs.issued if i.group == stuck.group), default=0)
            if other != rank and stuck.group in theirs.groups and last < stuck.seq:
                yield rank, other, f"in {stuck}"


def _stuck(state: RankState) -> Issued | None:
    """The oldest collective this rank is blocked in."""
    return next((i for i in state.issued if not i.is_done), None)


def _stuck_since(state: RankState, before: Mapping[int, RankState]) -> Issued | None:
    """The same, when it has not moved since the round before."""
    now, then = _stuck(state), before.get(state.rank)
    if now is None or then is None or state.activity in COMPILES or state.in_dynamo:
        return None
    old = _stuck(then)
    return now if old is not None and (old.group, old.seq) == (now.group, now.seq) else None
