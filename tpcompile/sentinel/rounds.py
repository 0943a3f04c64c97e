"""A rank that waits -> asks all ranks what they do, and judges the answers; by a local timer, never in steady state.

The timer looks at this process only. It asks when this rank has waited for others, in a compile or in a collective, for
longer than a moment; then again after twice the time, and so on. Who hears another rank ask puts its own question off.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from tpcompile.dist.liveness import process_state
from tpcompile.dist.signals import SigtermPipe
from tpcompile.evidence.causes import Cause
from tpcompile.sentinel import adapter, flight, hang
from tpcompile.sentinel.blackbox import has_aborted, last_stack
from tpcompile.sentinel.clock import WAITING
from tpcompile.sentinel.hang import Finding, Lost
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.waits import waits

if TYPE_CHECKING:
    from tpcompile.sentinel.sentinel import Sentinel

_TICK_S = 0.2
_ANSWER_S = 2.0
_FIRST_S = 0.5
_LONGEST_S = 30.0
_TELL_AFTER_S = 5.0
_TELL_EVERY_S = 60.0
_STOPPED_S = 4.0
_HOWS = {"dead": "died", "stopped": "stopped"}


class Rounds:
    """The timer thread of one rank."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpcompile-sentinel-timer", daemon=True)
        self.signals = SigtermPipe()
        self._before: dict[int, RankState] = {}
        self._silent_since: dict[int, float] = {}
        self._ticks, self._moved_at = -1, time.monotonic()
        self._interval_s, self._next_at = _FIRST_S, 0.0
        self._tell_after_s = _TELL_AFTER_S

    def start(self) -> None:
        """Begin; on the main thread, where alone Python sets signal handlers."""
        self.signals.install(self._thread)
        self._thread.start()

    def close(self) -> None:
        """End the thread and leave signals as they were, unless an exception still has to be printed."""
        self._done.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)
        if self._sentinel.shutdown.unwinds:
            self._sentinel.shutdown.stay_for_sigterm(self.signals)
        else:
            self.signals.restore()

    def forget(self) -> None:
        """In a forked child: the pipe that tells of signals is the parent's."""
        self.signals.forget()

    def put_off(self) -> None:
        """Another rank asks now: its answer serves us too."""
        self._next_at = time.monotonic() + self._interval_s

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                if self.signals.terminated(timeout_s=_TICK_S):
                    self._terminated()
                if self._is_due():
                    self.ask()
        except RuntimeError as error:
            if not self._done.is_set():
                self._sentinel.degrade(f"the job's store is gone: {error}")
        finally:
            self._sentinel.channel.close_client()

    def _terminated(self) -> None:
        """torchrun ends the job because a rank died, or somebody ends it; does not return."""
        sentinel = self._sentinel
        try:
            if sentinel.is_active and sentinel.shutdown.exit_code is None:
                self._blame_lost()
        except RuntimeError as error:
            logger.debug("no word of who died: the store is gone ({})", error)
        finally:
            sentinel.shutdown.terminated(128 + signal.SIGTERM)

    def _blame_lost(self) -> None:
        sentinel = self._sentinel
        found = sentinel.problems.of_lost(self.lost(settle_s=1.5), state_of(sentinel))
        if found is not None:
            known = len(sentinel.findings)
            sentinel.problems.raise_finding(found)
            sentinel.wait_for_finding(known)

    def _is_due(self) -> bool:
        clock, now = self._sentinel.clock, time.monotonic()
        if clock.ticks != self._ticks:
            self._ticks, self._moved_at, self._before = clock.ticks, now, {}
            self._interval_s, self._tell_after_s = _FIRST_S, _TELL_AFTER_S
        if now < self._next_at or not self._sentinel.is_active:
            return False
        if clock.activity == WAITING:
            return now - clock.since > _FIRST_S
        return now - self._moved_at > self._sentinel.hang_after_s and self._is_stuck()

    def _is_stuck(self) -> bool:
        if flight.is_blocked(self._sentinel.main_frame()):
            return True
        return any(not i.is_done and i.age_s > self._sentinel.hang_after_s for i in flight.recorded())

    def ask(self) -> None:
        """One round: everybody's state, a verdict or a line that says for whom we wait."""
        sentinel, channel = self._sentinel, self._sentinel.channel
        number = channel.number("asks")
        self._interval_s = min(2 * self._interval_s, _LONGEST_S)
        self._next_at = time.monotonic() + self._interval_s / 2
        channel.tell("ask", ask=number)
        expected = [r for r in channel.members if r not in sentinel.left and self._process(r) not in _HOWS]
        states = channel.answers(str(number), expected, timeout_s=_ANSWER_S)
        states |= sentinel.left
        lost = self._lost_among(states)
        if lost:
            self._next_at = time.monotonic() + _FIRST_S  # it is given up after a time, not after a number of rounds
        finding = hang.judge(states, lost, before=self._before) or self._late(states)
        self._before = states
        if finding is not None:
            sentinel.problems.raise_finding(finding)
        elif time.monotonic() - self._moved_at > self._tell_after_s:
            self._tell_after_s = min(2 * self._tell_after_s, self._tell_after_s + _TELL_EVERY_S)
            self._tell(states)

    def _tell(self, states: dict[int, RankState]) -> None:
        others = [hang.describe(s) for r, s in sorted(states.items()) if r != self._sentinel.rank]
        waited_s, limit_s = time.monotonic() - self._moved_at, self._sentinel.skew_limit_s
        text = "; ".join(others) or "no other rank answers"
        logger.warning("rank {} has waited {:.0f} of {:g} s: {}", self._sentinel.rank, waited_s, limit_s, text)

    def _late(self, states: dict[int, RankState]) -> Finding | None:
        """Ranks for which this one has waited longer than it may."""
        limit_s = self._sentinel.skew_limit_s
        if time.monotonic() - self._moved_at <= limit_s:
            return None
        slow = [s for r, s in sorted(states.items()) if r != self._sentinel.rank and not waits(s)]
        doing = "; ".join(hang.describe(state) for state in slow) or "no other rank answers"
        observed = f"rank {self._sentinel.rank} waited more than skew_limit_s = {limit_s:g} s: {doing}"
        line = next((state.line for state in slow if state.line), None)
        return Finding(Cause.NEVER_ARRIVED, observed, tuple(state.rank for state in slow), line)

    def lost(self, *, settle_s: float) -> list[Lost]:
        """Ranks of this host that are gone, giving a dying one a moment to be seen."""
        deadline = time.monotonic() + settle_s
        while True:
            dead = [rank for rank in self._sentinel.channel.members if self._is_dead(rank)]
            if dead or time.monotonic() > deadline:
                return [self._died(rank, is_final=True) for rank in dead]
            time.sleep(0.05)

    def _lost_among(self, states: dict[int, RankState]) -> list[Lost]:
        now = time.monotonic()
        absent = [rank for rank in self._sentinel.channel.members if rank not in states]
        self._silent_since = {rank: self._silent_since.get(rank, now) for rank in absent}
        found = []
        for rank in absent:
            how = _HOWS.get(self._process(rank), "silent")
            # py-spy and gdb stop a process for a moment, too.
            limit_s = {"died": 0.0, "stopped": _STOPPED_S, "silent": self._sentinel.unresponsive_s}[how]
            is_final = now - self._silent_since[rank] >= min(limit_s, self._sentinel.unresponsive_s)
            is_gone = how == "died"
            found.append(
                self._died(rank, is_final=is_final) if is_gone else Lost(rank, how, self._seen(rank), is_final=is_final)
            )
        return found

    def _is_dead(self, rank: int) -> bool:
        return rank not in self._sentinel.left and self._process(rank) == "dead"

    def _process(self, rank: int) -> str:
        found = self._sentinel.channel.process_of(rank)
        return "unknown" if found is None else process_state(found["pid"], found["host"])

    def _died(self, rank: int, *, is_final: bool) -> Lost:
        here = self._sentinel.channel.process_of(rank) or {}
        path = here.get("black_box", "")
        stack = last_stack(path, here.get("main_thread", 0))
        line = stack[-1] if stack else None
        return Lost(rank, "died", self._seen(rank), line, stack, aborted=has_aborted(path), is_final=is_final)

    def _seen(self, rank: int) -> str:
        state = self._before.get(rank)
        return hang.describe(state) if state is not None else ""


def state_of(sentinel: Sentinel) -> RankState:
    """What this rank does, for whoever asks; on any thread."""
    clock, frame = sentinel.clock, sentinel.main_frame()
    return RankState(
        rank=sentinel.rank,
        activity=clock.activity,
        since_s=time.monotonic() - clock.since,
        position=clock.current.position if clock.current else None,
        compile_id=clock.compile_id,
        reason=clock.reason,
        waits_at=clock.waits_at,
        in_dynamo=adapter.is_in_dynamo(frame),
        blocked=flight.is_blocked(frame),
        stack=flight.user_stack(frame),
        issued=flight.recorded(begun=clock.calls_begun()),
        calls=clock.calls(),
        calling=adapter.group_waited_in(frame),
        p2p=flight.point_to_point(frame),
        groups=adapter.group_names(),
    )
