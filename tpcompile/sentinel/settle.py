"""An alarm -> the ranks exchange what they compiled -> a verdict, and the action of the policy."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tpcompile.errors import DivergenceError, ExitCode, TpCompileError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.judgement.mesh_places import Coordinates
from tpcompile.evidence.judgement.verdict import SENTINEL, agree_rules
from tpcompile.evidence.records import Check, Divergence, DivergenceClass, Layer, RankRecord, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.node import has_other_nodes, is_first_here
from tpcompile.ranks.domain import Domain
from tpcompile.ranks.exchange import Exchange
from tpcompile.ranks.packed import PackedVerdict, packed
from tpcompile.ranks.recorded import record_side
from tpcompile.ranks.store import RankStore
from tpcompile.recording import CaptureSession
from tpcompile.report import console, show
from tpcompile.report.publish import publish
from tpcompile.sentinel.blackbox import forget
from tpcompile.sentinel.events import Alarm
from tpcompile.sentinel.executed import Executed
from tpcompile.sentinel.kept import STOPPED, Keeper
from tpcompile.sentinel.messages import Position
from tpcompile.sentinel.other_domains import OtherDomains
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.shutdown import Shutdown, stay_until_gone
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.sentinel.streams import timed_stream
from tpcompile.sentinel.timeline import Timeline, TimelineEvent

Policy = Literal["stop", "warn"] | Callable[[Verdict], None]
Kernels = Literal["warn", "stop"]
"""What to do when ranks run different kernels for one graph, as autotuning chose them."""
_EXCHANGE_S = 20.0
"""For the digests of ranks that are alive: on a loaded host one that compiles took more than 4 s to answer."""
_PUBLISH_S, _WRITTEN_S, _COME_S = 5.0, 2.0, 10.0
"""How long the ranks wait for the report of the judge, the judge for theirs, and for one that is behind the others."""
_OWN_EXCEPTION = (Cause.RAISED, Cause.COMPILE_FAILED)
"""Causes of which torchrun's report has the traceback."""


@dataclass(frozen=True)
class _Settled:
    """An alarm, and its result on this rank."""

    alarm: Alarm
    present: tuple[int, ...]
    """Ranks that took part."""
    record: RankRecord
    """What this rank compiled."""
    store: RankStore
    verdict: Verdict | None
    """None when the judging rank stopped responding."""
    is_judge: bool
    """This rank judged, and reports to the user."""

    @property
    def exit_code(self) -> int:
        """Exit code, equal on all ranks."""
        return self.verdict.exit_code if self.verdict is not None else ExitCode.FAIL


class Settlement:
    """Settles alarms one at a time, on the listener's thread of every rank."""

    def __init__(
        self,
        log: StoreLog,
        *,
        session: CaptureSession,
        progress: Progress,
        shutdown: Shutdown,
        timeline: Timeline,
        policy: Policy,
        allow: Allowed,
        kernels: Kernels,
        run_dir: Path | str | None,
        executed: Executed,
        snapshot: Snapshot,
        prints: bool,
        command: str,
        place: tuple[int, Domain],
        keeper: Keeper,
        places: Callable[[], Coordinates],
        why_gone: Callable[[], Check | None],
    ) -> None:
        self._log, self._session, self._progress, self._shutdown = log, session, progress, shutdown
        self._timeline, self.policy = timeline, policy
        self._why_gone = why_gone
        self._rules = agree_rules(timeout_s=_EXCHANGE_S, allowed=allow)
        self._kernels: Kernels = kernels
        self._run_dir = run_dir
        self._executed, self._snapshot, self._prints, self._command = executed, snapshot, prints, command
        self._world_size, self._domain = place
        self._keeper = keeper
        self._places, self._others = places, OtherDomains(log, places)
        self._agreed: Path | None = None
        self.job = ""
        """Identity of the run, once `agreed_dir` was called."""
        self.findings: list[Verdict] = []
        """Red verdicts so far; more than one only with a policy that continues."""

    def settle(self, alarm: Alarm, present: Sequence[int]) -> bool | None:
        """Agree on a verdict with the ranks that are present, then stop, warn or continue.

        Returns whether the verdict is red; None when there is nothing left to settle.
        """
        if self._shutdown.exit_code is not None:
            return None
        is_given_up = self._log.rank in alarm.gone
        if is_given_up:  # the other ranks have settled it without this one
            if self.policy == "stop":
                self._shutdown.leave(ExitCode.FAIL)
            return True
        self._timeline.note(TimelineEvent.ALARM)
        is_main = threading.current_thread() is threading.main_thread()  # which is what would have to go on
        if alarm.num_issued and not is_main:  # what this rank compiles before that collective is not known earlier
            self._progress.comes_past(alarm.num_issued, limit_s=_COME_S)
        record = self.record(alarm.position, alarm.num_issued)
        store = self._log.store(f"alarm/{alarm.key}")
        problems = [alarm.problem] if alarm.problem else []
        side = record_side(
            record, self._rules, problems=problems, flow_of=self._executed.flow_of, domain=self._log.members,
            why_absent=self._why_gone, host_of=self._log.host_of, coordinates=self._places,
        )  # fmt: skip
        exchange = Exchange(store, present, others=self, timeout_s=_EXCHANGE_S)
        verdict = exchange.verdict(side)
        if verdict is not None and alarm.is_interrupted:
            incomplete = {"status": Status.SKIPPED, "exit_code": ExitCode.INCOMPLETE}
            verdict = verdict.model_copy(update=incomplete)
        self._timeline.note(TimelineEvent.VERDICT)
        settled = _Settled(alarm, tuple(present), record, store, verdict, exchange.has_judged)
        if verdict is None:
            if self.policy == "stop":
                self._stop(settled)
            return True
        if not is_grave(verdict, kernels=self._kernels):
            if settled.is_judge:
                self._log_non_fatal(settled, verdict)
            return False
        self._act(settled, verdict)
        self.findings.append(verdict)
        return True

    def settle_alone(self, problem: Check) -> None:
        """Stop with a verdict of this rank's own, where it reaches no rank of a different node."""
        record = self.record(None)
        side = record_side(record, self._rules, problems=[problem], domain=self._log.members, coordinates=self._places)
        verdict = side.judged_alone({})
        self._timeline.note(TimelineEvent.VERDICT)
        try:
            self._report(record)
            if is_first_here():
                self._publish(verdict, self._directory())
        except TpCompileError as error:
            logger.error("no report: {}; rank divergence: {}", error, verdict.summary)
        self._shutdown.tell_launcher(DivergenceError(verdict.summary))
        self._shutdown.leave(verdict.exit_code)

    def _act(self, settled: _Settled, verdict: Verdict) -> None:
        """Apply the policy to a red verdict."""
        if callable(self.policy):
            self._call(self.policy, verdict)
        elif self.policy == "stop":
            self._stop(self._with_other_domains(settled))
        elif settled.is_judge:
            logger.warning("rank divergence: {}", verdict.summary)

    def _with_other_domains(self, settled: _Settled) -> _Settled:
        """With the ranks of other domains that end the job for the same."""
        verdict, store = settled.verdict, settled.store
        if verdict is None or not self._others.exist:
            return settled
        with suppress(RuntimeError):  # the rank that served the store has ended
            if settled.is_judge:
                verdict = self._others.together(verdict)
                store.put("together", packed(verdict))
            else:
                verdict = store.get("together", PackedVerdict, timeout_s=_PUBLISH_S) or verdict
        return replace(settled, verdict=verdict)

    def _call(self, policy: Callable[[Verdict], None], verdict: Verdict) -> None:
        try:
            policy(verdict)
        except SystemExit as ending:  # would end only this thread
            self._shutdown.leave(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
        except Exception as error:
            logger.error("rank {}: the policy of the sentinel failed", self._log.rank, exception=error)

    def _log_non_fatal(self, settled: _Settled, verdict: Verdict) -> None:
        """Log differences that do not end the job."""
        if not verdict.divergences:
            self._tell_not_compared(settled)
        for found in verdict.divergences:
            if found.is_choice:
                logger.warning("{}: {}; the collectives are equal, the job goes on", found.cause, found.title)
            elif found.cls == DivergenceClass.LABEL:
                logger.info("accepted ({}): {}; {}", found.cls, found.title, found.advice)

    def _tell_not_compared(self, settled: _Settled) -> None:
        """Log that hashes differ from those of ranks that have left, which cannot be compared further."""
        left = [rank for rank in self._log.members if rank not in settled.present]
        if left:
            logger.warning(
                "what was compiled at {} differs between the ranks; {} left before the comparison",
                settled.alarm.position, named_ranks(left),
            )  # fmt: skip

    def record(self, position: Position | None, num_issued: int = 0) -> RankRecord:
        """This rank's compiles of the region up to the position; all but the last are known to agree."""
        everything = self._session.record(
            rank=self._log.rank,
            world_size=self._world_size,
            domain=self._domain.name,
            coordinate=self._domain.coordinate,
            coordinates=self._domain.coordinates,
            job=self.job,
        )
        wanted = self._progress.compiled_until(position, num_issued) if position is not None else frozenset()
        kept = tuple(compile_ for compile_ in everything.compiles if compile_.compile_id in wanted)
        return everything.model_copy(update={"compiles": kept, "counters": ()})

    def _stop(self, settled: _Settled) -> None:
        """Write the report and end the process; returns when an exception ends it already."""
        if len(self._log.members) < self._world_size:  # another domain may judge later
            self._executed.keep()
        self._keeper.end(STOPPED, problem=settled.alarm.problem)
        try:
            self._report(settled.record)
            self._publish_in_turn(settled)
        except TpCompileError as error:
            logger.error("no report: {}", error)
            if settled.is_judge and settled.verdict is not None:
                logger.error("rank divergence: {}", settled.verdict.summary)
        self._tell_launcher(settled)
        for rank in filter(self.is_gone, settled.alarm.gone):
            self._keeper.adopt(rank)
            forget(self._log.process_of(rank).black_box)
        self._shutdown.exit_code = settled.exit_code
        self.wait_for_first_failed_rank()
        self._shutdown.leave(self._shutdown.exit_code)

    def _publish_in_turn(self, settled: _Settled) -> None:
        """The judge publishes after the other ranks have written, and ends once they have its verdict."""
        store = settled.store
        with suppress(RuntimeError):  # the rank that served the store has ended
            if settled.is_judge and len(settled.present) > 1:
                store.wait("all written", timeout_s=_WRITTEN_S)
            elif not settled.is_judge:
                if store.count("written") == len(settled.present) - 1:
                    store.put("all written", True)
                store.wait("published", timeout_s=_PUBLISH_S)
        if not settled.is_judge:
            self._write_for_node(settled.verdict)
            return
        if settled.verdict is not None:
            self._publish_once(settled.verdict)
        with suppress(RuntimeError):
            store.put("published", True)

    def _publish_once(self, verdict: Verdict) -> None:
        """Publish it, or where a different domain does, log what is different here."""
        if not self._others.exist:
            self._publish(verdict, self._directory())
            return
        with suppress(RuntimeError):
            if self._others.claims_report():
                self._publish(verdict, self._directory())
                self._others.say_reported(verdict.summary)
                return
            if self._others.reported() != verdict.summary:
                logger.error("rank divergence in {}, too: {}", self._domain.name, verdict.summary)
        self._write_for_node(verdict)

    def _write_for_node(self, verdict: Verdict | None) -> None:
        """Write the verdict to the folder of this node, where the judge has a different one."""
        if verdict is None or not (verdict.hosts or has_other_nodes()) or not is_first_here():
            return
        with suppress(TpCompileError):  # that it cannot be written is said already
            if self._directory().write_verdict(verdict):
                self._directory().write_run(self._facts())

    def _tell_launcher(self, settled: _Settled) -> None:
        """Have torchrun report the verdict as its root cause, of a rank to blame; its exception is one already."""
        verdict = settled.verdict
        if verdict is None or verdict.lead is None or verdict.lead.cause in _OWN_EXCEPTION:
            return
        blamed = set(verdict.lead.ranks) & set(settled.present)
        if self._log.rank in blamed or not blamed:
            self._shutdown.tell_launcher(DivergenceError(verdict.summary))

    def _report(self, record: RankRecord) -> None:
        """Write this rank's evidence."""
        directory = self._directory()
        directory.write_record(record)
        timeline = json.dumps(self._timeline.entries, indent=1)
        directory.write_text(f"rank_{record.rank}/timeline.json", timeline)
        stream = timed_stream(self._snapshot.state(), time.time())
        directory.write_text(f"streams/rank_{record.rank}.json", stream.to_json())

    def _publish(self, verdict: Verdict, directory: RunDir) -> None:
        """Write and print it; print it alone where a different job, or domain, was faster."""
        if not directory.write_verdict(verdict):
            if not self._prints:
                return
            logger.warning("{} has the verdict of a different job or domain; this one is printed only", directory.path)
            show.show(verdict, console.stderr(), run=None, command=self._command)
            return
        directory.write_run(self._facts())
        if self._prints:
            publish(verdict, directory, console.stderr(), os.environ, command=self._command)

    def _facts(self) -> dict[str, Any]:
        """How a replay judges the records."""
        rules = self._rules
        return {"kind": SENTINEL, "domain": self._domain.name, "timeout_s": rules.timeout_s, "allowed": rules.allowed}

    def _directory(self) -> RunDir:
        """Directory of all ranks' reports, of this job alone. Raises PreflightError when it cannot be written."""
        return RunDir.create(self.agreed_dir())

    def agreed_dir(self) -> Path:
        """Which one: the ranks agree on it while they reach each other. Raises PreflightError if it is not seen."""
        if self._agreed is None:
            self.job = self._log.job()
            self._agreed = self._log.run_dir(self._run_dir)
        return self._agreed

    def keep_traceback(self, text: str) -> None:
        """Write the traceback to the run directory."""
        try:
            self._directory().write_text(f"rank_{self._log.rank}/traceback.txt", text)
        except TpCompileError as error:
            logger.error("the traceback of rank {} could not be written: {}", self._log.rank, error)

    def wait_for_first_failed_rank(self) -> None:
        """Wait until the first rank that raised has ended: torchrun's root cause is the first process to end."""
        log, first = self._log, None
        with suppress(RuntimeError):  # the rank that served the store has ended
            first = log.first_raised()
        if first is None or first == log.rank:
            return
        stay_until_gone(log.process_of(first).state, lambda: log.has_closed(first))

    # Interface to the exchange.

    def last_seen(self, rank: int) -> str:
        """What is known about a rank that does not answer."""
        return "its process died" if self.is_gone(rank) else "unknown"

    def is_gone(self, rank: int) -> bool:
        """True when the rank's process is dead or stopped."""
        return self._log.process_of(rank).state() in ("dead", "stopped")


def is_grave(verdict: Verdict, *, kernels: Kernels) -> bool:
    """True for a verdict that must end the job.

    Different environments do not while programs agree: the preflight handshake compares those. With `kernels="warn"`,
    kernels that each rank chose by its own timings do not either: the program is the same, only rounding differs.
    """
    red = [divergence for divergence in verdict.divergences if divergence.is_red]
    may_choose = kernels == "warn"
    grave = [one for one in red if one.layer != Layer.ENVIRONMENT and not (may_choose and one.is_choice)]
    return bool(grave) or _has_more_red_checks(verdict, red)


def _has_more_red_checks(verdict: Verdict, divergences: Sequence[Divergence]) -> bool:
    """True when a red check is explained neither by the environment nor by one of the divergences."""
    layers = {check.layer for check in verdict.checks if check.is_red}
    layers.discard(Layer.ENVIRONMENT)
    for divergence in divergences:
        layers.difference_update([divergence.layer, *divergence.consequences])
    return bool(layers)
