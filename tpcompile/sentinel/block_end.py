"""How the block of a sentinel ends on this rank -> what the other ranks are told, and for what it waits.

A rank ends with its block, with an exception, by SIGTERM or by somebody who interrupts the job. What is wrong then is
settled by all ranks, so this one stays until they have done so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from signal import SIGTERM

from tpcompile.evidence.records import Check, Verdict
from tpcompile.recording import CaptureSession
from tpcompile.sentinel.alarms import Alarms
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.effects import Effects
from tpcompile.sentinel.exception_cause import Losses
from tpcompile.sentinel.executed import Executed
from tpcompile.sentinel.kept import TERMINATED, Keeper
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.settle import Policy, Settlement
from tpcompile.sentinel.shutdown import Shutdown
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.torch_api import watching

_CLOSE_S = 10.0


class BlockEnd:
    """Ends the block of one rank."""

    def __init__(
        self,
        log: StoreLog,
        progress: Progress,
        shutdown: Shutdown,
        *,
        session: CaptureSession,
        policy: Policy,
        losses: Losses,
        alarms: Alarms,
        settlement: Settlement,
        effects: Effects,
        snapshot: Snapshot,
        keeper: Keeper,
        executed: Executed,
    ) -> None:
        self._log, self._progress, self._shutdown, self._session = log, progress, shutdown, session
        self._policy, self._losses, self._alarms, self._settlement = policy, losses, alarms, settlement
        self._effects, self._snapshot, self._keeper, self._executed = effects, snapshot, keeper, executed
        self._problem: Check | None = None
        """What ends this rank with an exception."""

    @property
    def _findings(self) -> Sequence[Verdict]:
        return self._settlement.findings

    def wait_for_finding(self, known: int) -> None:
        """Give the ranks time to settle an alarm before this process ends; it had `known` findings before."""
        self._effects.wait_until(
            lambda: len(self._findings) > known or not self._progress.is_active, timeout_s=_CLOSE_S
        )

    def reached(self) -> None:
        """The block ended without an exception: compare what ran."""
        watching.finish_device_work()  # a hang on the GPU happens while the sentinel still watches
        known = len(self._findings)

        def compare() -> None:
            if self._effects.compare_all_that_ran():
                self.wait_for_finding(known)

        self._effects.safely(compare)

    def compile_raises(self) -> None:
        """Record that a compile raises: no rank ends before the traceback is written."""
        self._shutdown.is_raising = True
        self._effects.safely(self._log.raises_first)

    def raised(self, error: BaseException) -> None:
        """Keep the traceback of an exception, raise a finding, and let the rank that raised first end first."""
        text, known = self._shutdown.raises(error), len(self._findings)
        self._effects.safely(lambda: self._keep(error, text))
        if self._shutdown.exit_code is None:
            # A rank that died or left is the cause, else the exception itself.
            self._effects.safely(lambda: self._raise_alarm(error))
            self.wait_for_finding(known)
        if self._policy == "stop":
            self._effects.safely(self._settlement.wait_for_first_failed_rank)

    def _raise_alarm(self, error: BaseException) -> None:
        self._problem, gone = self._losses.problem(error, self._session.compiles())
        self._alarms.once(self._problem, gone)

    def _keep(self, error: BaseException, text: str) -> None:
        is_first = self._log.raises_first()
        if self._policy != "stop":
            return  # the job may continue
        self._settlement.keep_traceback(text)
        if is_first:
            self._shutdown.tell_launcher(error)

    def interrupted(self) -> None:
        """Somebody ends the job: where this rank has waited in vain, have the ranks settle for whom."""
        if not self._progress.is_active or self._shutdown.exit_code is not None:
            return
        found, known = self._losses.interrupted(), len(self._findings)
        if found is not None:
            self._alarms.once(finding_check(found), is_interrupted=True)
            self.wait_for_finding(known)

    def terminated(self) -> None:
        """Handle SIGTERM: torchrun ends the job, usually because a rank died. Does not return."""
        try:
            if self._progress.is_active and self._shutdown.exit_code is None:
                self._keeper.end(TERMINATED)
                found, known = self._losses.at_sigterm(), len(self._findings)
                if found is not None:
                    self._alarms.once(*found)
                is_open = not known and (self._shutdown.unwinds or self._alarms.is_raised)
                if found is not None or is_open:  # its main thread, or another rank, is naming the problem
                    self.wait_for_finding(known)
                elif (late := self._losses.interrupted()) is not None:
                    logger.warning("rank {}: {}", self._log.rank, late.observed)
        except RuntimeError as error:
            logger.debug("cannot find out which rank died: the store cannot be reached ({})", error)
        finally:
            self._shutdown.terminated(128 + SIGTERM)

    def say_left(self, why: str, *, has_heard: Callable[[float], bool]) -> None:
        """Publish that this rank left; `has_heard` waits, up to so many seconds, until it has read all entries."""
        state = self._snapshot.state().model_copy(update={"ended": why, "waits_at": None})
        try:
            self._executed.keep()
            self._keeper.end(why, problem=self._problem, state=state)
            self._log.leave(state, has_heard=has_heard)
            if self._shutdown.unwinds:
                self._log.say_closed()
        except RuntimeError:
            logger.debug("the store could not be reached when the sentinel closed")
