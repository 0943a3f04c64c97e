"""When a waiting rank asks the other ranks for their state, and what it concludes from the answers. Pure.

It asks after it has waited in a compile or in a collective for `_FIRST_S` or `hang_after_s`, then in intervals that
double. A rank that receives a question of a different rank postpones its own. Nothing here runs in steady state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.deadlock import Deadlock, Seen
from tpcompile.sentinel.describe import clock_text, describe
from tpcompile.sentinel.events import Absence, Answers
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.hang import why_stuck
from tpcompile.sentinel.messages import WAITING, RankState
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.situation import Lost, Situation

_FIRST_S = 0.5
_LONGEST_S = 30.0
_TELL_AFTER_S = 10.0
_TELL_EVERY_S = 60.0
_GRACE_S = 60.0
"""Longest additional wait, for the neighbours of a rank that is late in a different domain to report it first."""
_HOWS = {"dead": "died", "stopped": "stopped"}


@dataclass(frozen=True)
class Limits:
    """Limits of a wait, in seconds."""

    hang_after_s: float = 3.0
    stopped_s: float = 60.0
    unresponsive_s: float = 60.0
    skew_limit_s: float = 3600.0


class Asking:
    """Decides for one rank when to ask, and when a wait has no end."""

    def __init__(self, rank: int, limits: Limits, progress: Progress) -> None:
        self._rank, self._limits, self._progress = rank, limits, progress
        self._before: Mapping[int, RankState] = {}
        self._left: dict[int, RankState] = {}
        """Ranks that had left when this rank asked."""
        self._silent_since: dict[int, float] = {}
        self._deadlock, self._rounds = Deadlock(), 0
        self._ticks, self._moved_at_s = -1, 0.0
        self._communicated: object = None
        """The collectives and messages of this rank when it asked last."""
        self._interval_s, self._next_at_s = _FIRST_S, 0.0
        self._tell_after_s = _TELL_AFTER_S
        self.now_s = 0.0

    def put_off(self) -> None:
        """Postpone the next question: a different rank asks now, and all ranks see the answers."""
        self._next_at_s = self.now_s + self._interval_s

    def notices(self, now_s: float) -> None:
        """Record the time, and restart the wait if this rank made progress."""
        self.now_s = now_s
        if self._progress.ticks != self._ticks:
            self._ticks, self._moved_at_s, self._before = self._progress.ticks, now_s, {}
            self._interval_s, self._tell_after_s = _FIRST_S, _TELL_AFTER_S

    def wants_to_ask(self, now_s: float) -> bool:
        """True when this rank has waited at a position for more than `_FIRST_S`."""
        if now_s < self._next_at_s or self._progress.activity != WAITING:
            return False
        return now_s - self._progress.since > _FIRST_S

    def wants_to_look(self, now_s: float) -> bool:
        """True when this rank made no progress for `hang_after_s`, so that the main thread may be stuck."""
        if now_s < self._next_at_s or self._progress.activity == WAITING:
            return False
        return now_s - self._moved_at_s > self._limits.hang_after_s

    def asks(self, now_s: float, left: Mapping[int, RankState]) -> None:
        """Record that this rank asks now, and which ranks have left: later ones do not explain the answers."""
        self._left = dict(left)
        self._interval_s = min(2 * self._interval_s, _LONGEST_S)
        self._next_at_s = now_s + self._interval_s / 2

    def why_stuck(self, answers: Answers) -> Finding | None:
        """Why the ranks do not progress; None while a rank that is waited for may still arrive."""
        states = ByRank({**answers.states, **self._left})
        lost = self._lost(answers)
        if lost:
            self._next_at_s = answers.now_s + _FIRST_S  # a rank is given up after a time, not after a number of rounds
        self._compare_with_last_time(states.get(self._rank), answers.now_s)
        before, self._before = self._before, states
        beside = {rank: seen.state for rank, seen in answers.other_domains.items()}
        situation = Situation(states, before=before, lost=lost, other_domains=beside)
        self._rounds += 1
        here = states.map(lambda state: Seen(state=state, number=self._rounds, domain=states.ranks))
        ring = self._deadlock.find(ByRank({**answers.other_domains, **here}))
        return why_stuck(situation) or ring or self._late(states, answers.now_s)

    def _compare_with_last_time(self, here: RankState | None, now_s: float) -> None:
        """Restart the wait where this rank has communicated since it asked: a program without compiled regions runs
        for hours in which nothing else shows that it moves, and waits now and then."""
        if here is None or here.waits_at is not None:
            return
        collectives = tuple(one.id for one in here.issued)
        done = collectives, tuple((one.op, one.peer, one.number) for one in here.messages), here.p2p
        if done != self._communicated:
            self._communicated = done
            waited_s = here.blocked_in.age_s if here.blocked_in is not None else 0.0
            self._moved_at_s = max(self._moved_at_s, now_s - waited_s)

    def news(self, states: Mapping[int, RankState], now_s: float) -> str:
        """A log line on the ranks this one waits for, at growing intervals; empty in between."""
        waited_s, limit_s = now_s - self._moved_at_s, self._limits.skew_limit_s
        here = states.get(self._rank)
        if waited_s <= self._tell_after_s or here is None or not here.waits:
            return ""
        self._tell_after_s = min(2 * self._tell_after_s, self._tell_after_s + _TELL_EVERY_S)
        text = _describe_all(ByRank(states).without([self._rank]))
        return f"rank {self._rank} has waited {waited_s:.0f} of {limit_s:g} s: {text}"

    def lost(self, absent: Mapping[int, Absence]) -> ByRank[Lost]:
        """The ranks whose process has died, among those that did not answer."""
        dead = ByRank(absent).where(lambda found: found.how == "dead")
        return ByRank({rank: self._died(rank, found) for rank, found in dead.items()})

    def _late(self, states: ByRank[RankState], now_s: float) -> Finding | None:
        """Ranks for which this rank has waited longer than `skew_limit_s`.

        Where all ranks of this domain wait, the late rank is in a different domain, whose ranks report it first.
        """
        limit_s = self._limits.skew_limit_s
        others = states.without([self._rank])
        slow = others.where(lambda state: not state.waits)
        grace_s = 0.0 if slow or not others else min(limit_s / 2, _GRACE_S)
        if now_s - self._moved_at_s <= limit_s + grace_s:
            return None
        text = _describe_all(slow or others)
        observed = f"rank {self._rank} waited more than skew_limit_s = {limit_s:g} s: {text}"
        line = first(known(state.line for state in slow.values()))
        return Finding(Cause.NEVER_ARRIVED, observed, slow.ranks, line)

    def waited_for(self, states: ByRank[RankState], now_s: float) -> Finding | None:
        """The ranks for which this rank waits when somebody ends the job, after more than `hang_after_s`.

        While the job runs they may only be slow; nobody will see them arrive now.
        """
        waited_s = now_s - self._moved_at_s
        return waited_for(states, self._rank, waited_s=waited_s) if waited_s > self._limits.hang_after_s else None

    def _lost(self, answers: Answers) -> ByRank[Lost]:
        now_s = answers.now_s
        self._silent_since = {rank: self._silent_since.get(rank, now_s) for rank in answers.absent}
        unix_s = answers.unix_s
        return ByRank({rank: self._gone(rank, found, now_s, unix_s) for rank, found in answers.absent.items()})

    def _gone(self, rank: int, found: Absence, now_s: float, unix_s: float) -> Lost:
        how = _HOWS.get(found.how, "silent")
        if how == "died":
            return self._died(rank, found)
        limit_s = self._limits.stopped_s if how == "stopped" else self._limits.unresponsive_s
        silent_s = now_s - self._silent_since[rank]
        is_final = silent_s >= limit_s
        since = clock_text(unix_s - silent_s, for_s=silent_s)
        return Lost(rank, how, self._seen(rank), is_final=is_final, host=found.host, since=since)

    def _died(self, rank: int, found: Absence) -> Lost:
        return Lost(rank, "died", self._seen(rank), found.stack, found.aborted, host=found.host, is_final=True)

    def _seen(self, rank: int) -> str:
        state = self._before.get(rank)
        return describe(state) if state is not None else ""


def waited_for(states: ByRank[RankState], rank: int, *, waited_s: float) -> Finding | None:
    """The ranks for which this one had waited when the job ended; None where it waits for nobody that is late."""
    here, others = states.get(rank), states.without([rank])
    slow = others.where(lambda state: not state.waits and not state.ended)
    if here is None or not here.waits or not slow:
        return None
    observed = f"when the job was ended, rank {rank} had waited {waited_s:.0f} s: {_describe_all(slow)}"
    line = first(known(state.program_line for state in slow.values()))
    return Finding(Cause.NEVER_ARRIVED, observed, slow.ranks, line)


def _describe_all(states: ByRank[RankState]) -> str:
    return "; ".join(map(describe, states.values())) or "no other rank answers"
