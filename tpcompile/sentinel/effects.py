"""Events -> the protocol of one rank -> its actions, carried out through the store, threads and the other parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tpcompile.sentinel import events as ev
from tpcompile.sentinel.agreed_comparison import AgreedComparison
from tpcompile.sentinel.agreed_values import AgreedValues
from tpcompile.sentinel.alarms import Alarms
from tpcompile.sentinel.asking import Limits
from tpcompile.sentinel.blackbox import absences
from tpcompile.sentinel.comparison import Comparison
from tpcompile.sentinel.kept import Keeper
from tpcompile.sentinel.log_entries import Degraded, Passed
from tpcompile.sentinel.messages import RUNNING, WAITING
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.protocol import Protocol
from tpcompile.sentinel.settle import Settlement
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog

_DECIDE_S, _ANSWER_S, _LEAVING_S = 2.0, 2.0, 10.0


class Effects:
    """Carries out the actions of one rank; `on` may be called from any thread."""

    def __init__(
        self,
        log: StoreLog,
        protocol: Protocol,
        progress: Progress,
        *,
        snapshot: Snapshot,
        settlement: Settlement,
        alarms: Alarms,
        agreed: AgreedValues,
        limits: Limits,
        keeper: Keeper,
    ) -> None:
        self._log, self._protocol, self._progress = log, protocol, progress
        self._snapshot, self._settlement, self._limits = snapshot, settlement, limits
        self._keeper = keeper
        self._comparison = Comparison(log, progress, on=self.on, has_parted=lambda: protocol.has_parted)
        self._agreed_comparison = AgreedComparison(log, agreed, on=self.on)
        self._changed = threading.Condition()
        self._late: list[threading.Timer] = []
        self._effects: dict[type, Callable[[Any], None]] = {
            ev.Announce: lambda action: log.announce(action.found),
            ev.Post: self._post,
            ev.Wait: self._wait,
            ev.Release: self._release,
            ev.DecideEqual: lambda action: log.settle(action.position),
            ev.TellPassed: lambda action: log.decide(action.position, Passed, state=snapshot.state()),
            ev.RaiseAlarm: alarms.of_compile,
            ev.RaiseOneRank: alarms.of_one_rank,
            ev.RaiseFinding: alarms.of_finding,
            ev.Later: self._later,
            ev.Answer: self._answer,
            ev.Compare: self._compare,
            ev.Look: self._look,
            ev.Recall: self._recall,
            ev.TellValues: lambda action: self._agreed_comparison.tell(action.number, action.span),
            ev.Ask: self._ask,
            ev.Say: lambda action: logger.info("{}", action.text),
            ev.Settle: self._settle,
            ev.StopWatching: self._stop_watching,
        }

    def wait_until(self, holds: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for something that an event may bring about."""
        with self._changed:
            self._changed.wait_for(holds, timeout=timeout_s)

    def compare_all_that_ran(self) -> bool:
        """Compare with all ranks before this one leaves: a short job may end before the timer compares.

        True where a finding follows.
        """
        had_parted = self._protocol.has_parted
        # a rank that has left takes no part in open comparisons
        self.wait_until(lambda: self._protocol.has_decided_all() or not self._progress.is_active, timeout_s=_DECIDE_S)
        is_found = self._comparison.at_the_end()
        self._agreed_comparison.at_the_end()
        return is_found or (self._protocol.has_parted and not had_parted)

    def close(self) -> None:
        """Drop what was to happen later."""
        for late in self._late:
            late.cancel()

    def on(self, event: ev.Event) -> None:
        def carry_out() -> None:
            for action in self._protocol.on(event):
                self._effects[type(action)](action)

        self.safely(carry_out)

    def safely(self, act: Callable[[], object]) -> None:
        """Call `act`; if the store cannot be reached, stop watching, so that the job itself is not affected."""
        try:
            act()
        except RuntimeError as error:
            self.on(ev.Failed(f"the job's store cannot be reached: {error}"))

    def _post(self, action: ev.Post) -> None:
        is_last, is_equal = self._log.post(action.position, action.post)
        self.on(ev.Posted(action.position, is_last, is_equal))

    def _wait(self, action: ev.Wait) -> None:
        """Block the compiling thread until all ranks agree, or have settled that they continue."""
        self._progress.waits_at = action.position
        self._progress.set(WAITING)
        try:
            with self._changed:
                while self._protocol.must_wait(action.position):
                    self._changed.wait(timeout=1.0)  # in slices, so that Ctrl-C is handled
        finally:
            self._progress.waits_at = None
            self._progress.set(RUNNING)

    def _release(self, _: ev.Release) -> None:
        with self._changed:
            self._changed.notify_all()

    def _later(self, action: ev.Later) -> None:
        def on_late() -> None:
            self.on(action.event)
            self._log.close_client()  # of the timer's thread

        late = threading.Timer(action.after_s, on_late)
        late.daemon = True
        self._late.append(late)
        late.start()

    def _ask(self, action: ev.Ask) -> None:
        may_live = [rank for rank, found in absences(self._log, action.expected).items() if found.may_live]
        states = self._log.ask(may_live, timeout_s=_ANSWER_S)
        silent = set(action.expected) - states.keys()
        absent = absences(self._log, silent)
        self.on(ev.Answers(time.monotonic(), states, absent, self._log.other_domains(states), time.time()))

    def _answer(self, action: ev.Answer) -> None:
        state = self._snapshot.state()
        self._log.answer(action.number, state)
        self._keeper.note(state)

    def _compare(self, _: ev.Compare) -> None:
        self._comparison.with_the_next()
        self._agreed_comparison.with_the_next()

    def _recall(self, action: ev.Recall) -> None:
        here = [rank for rank in self._log.members if rank not in self._protocol.left]
        self._agreed_comparison.recall(action.span, here, wait_s=_LEAVING_S if action.waits else 0.0)

    def _settle(self, action: ev.Settle) -> None:
        is_red = self._settlement.settle(action.alarm, action.present)
        if is_red is not None:
            self.on(ev.Settled(action.alarm.position, is_red))

    def _stop_watching(self, action: ev.StopWatching) -> None:
        """Stop watching on all ranks, with one warning; the job continues without a sentinel."""
        logger.warning("rank {}: the sentinel has stopped watching: {}", self._log.rank, action.why)
        self._log.append(Degraded, why=f"on rank {self._log.rank}, {action.why}")

    def _look(self, _: ev.Look) -> None:
        is_stuck = self._snapshot.is_stuck(for_s=self._limits.hang_after_s)
        if is_stuck:
            self._keeper.note()
        self.on(ev.Looked(time.monotonic(), is_stuck))
