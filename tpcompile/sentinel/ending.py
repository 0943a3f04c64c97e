"""An alarm -> the ranks exchange what they compiled -> a verdict, and what the policy makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from tpcompile.dist.exchange import Exchange
from tpcompile.dist.liveness import process_state
from tpcompile.errors import ExitCode, TpCompileError
from tpcompile.evidence.compare import Allowed
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import (
    Check,
    Frozen,
    Layer,
    RankRecord,
    Status,
    Verdict,
)  # fmt: skip
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.verdict import SENTINEL, agree_rules
from tpcompile.report.publish import publish
from tpcompile.sentinel.blackbox import forget
from tpcompile.sentinel.messages import Position
from tpcompile.sentinel.shutdown import stay_until_gone
from tpcompile.sentinel.sink import logger

if TYPE_CHECKING:
    from tpcompile.sentinel.sentinel import Sentinel

Kernels = Literal["warn", "stop"]
"""What to do when ranks run other kernels for one graph, as autotuning chose them."""
_EXCHANGE_S = 4.0
_PUBLISH_S = 5.0


class Alarm(Frozen):
    """Something is wrong, or may be: what all ranks settle together."""

    key: str
    position: Position | None = None
    """The compile to compare, None when it is not about one."""
    problem: Check | None = None
    """What is already known to be wrong."""
    gone: tuple[int, ...] = ()
    """Ranks that cannot answer."""


class Ending:
    """Settles alarms, one after the other, on the follower's thread of every rank."""

    def __init__(self, sentinel: Sentinel, *, allow: Allowed, kernels: Kernels, run_dir: Path | str | None) -> None:
        self._sentinel = sentinel
        self._rules = agree_rules(timeout_s=_EXCHANGE_S, allowed=allow)
        self._kernels: Kernels = kernels
        self._run_dir = run_dir

    def settle(self, alarm: Alarm) -> None:
        """Agree on a verdict, then stop, warn or go on."""
        sentinel = self._sentinel
        if sentinel.shutdown.exit_code is not None:
            return
        if alarm.position is not None and sentinel.clock.region(alarm.position.region).is_reported:
            sentinel.free(alarm.position)
            return
        if sentinel.rank in alarm.gone:  # given up, and back: the others have settled it without this rank
            if sentinel.policy == "stop":
                sentinel.shutdown.leave(ExitCode.FAIL)
            sentinel.settled(alarm.position, None, is_red=True)
            return
        sentinel.note("alarm")
        record = self.record(alarm.position)
        store = sentinel.channel.store(f"alarm/{alarm.key}")
        exchange = Exchange(store, self._rules, board=self, members=self._present(alarm))
        problems = [alarm.problem] if alarm.problem else []
        verdict = exchange.verdict(record, timeout_s=_EXCHANGE_S, problems=problems)
        sentinel.note("verdict")
        is_red = verdict is None or is_grave(verdict, kernels=self._kernels)
        is_judge = store.peek("judge") == sentinel.rank
        if not is_red:
            if is_judge and verdict is not None:
                for chosen in (d for d in verdict.divergences if d.is_choice):
                    logger.warning("{}: {}; the collectives are equal, the job goes on", chosen.cause, chosen.title)
                self._tell_unexplained(alarm, verdict)
            sentinel.settled(alarm.position, verdict, is_red=False)
        elif callable(sentinel.policy):
            try:
                if verdict is not None:
                    sentinel.policy(verdict)
            except SystemExit as ending:  # in a thread it would end the thread
                sentinel.shutdown.leave(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
            except Exception as error:
                logger.error("rank {}: the policy of the sentinel failed", sentinel.rank, exception=error)
            sentinel.settled(alarm.position, verdict, is_red=True)
        elif sentinel.policy == "warn":
            if is_judge and verdict is not None:
                logger.warning("rank divergence: {}", verdict.summary)
            sentinel.settled(alarm.position, verdict, is_red=True)
        else:
            self._stop(alarm, record, verdict, is_judge=is_judge)

    def _tell_unexplained(self, alarm: Alarm, verdict: Verdict) -> None:
        """Ranks that have left cannot say what they compiled; their hashes differed, and that is all there is."""
        left = sorted(self._sentinel.left)
        if alarm.position is not None and left and not verdict.divergences:
            logger.warning(
                "what was compiled at {} is not the same on all ranks; rank {} left before anybody could compare",
                alarm.position, ranks_text(left),
            )  # fmt: skip

    def record(self, position: Position | None) -> RankRecord:
        """This rank's compiles of the region up to the position; they agreed up to the last."""
        sentinel = self._sentinel
        everything = sentinel.session.record(
            rank=sentinel.rank, world_size=sentinel.world_size, domain=sentinel.domain, coordinate=sentinel.coordinate
        )
        wanted: set[str] = set()
        if position is not None:
            places = sentinel.clock.region(position.region).compiled
            wanted = {
                id_.strip("[]") for place, id_ in places.items() if place <= (position.call, position.index)
            }  # fmt: skip
        kept = tuple(c for c in everything.compiles if c.compile_id in wanted)
        return everything.model_copy(update={"compiles": kept, "counters": ()})

    def _stop(self, alarm: Alarm, record: RankRecord, verdict: Verdict | None, *, is_judge: bool) -> None:
        sentinel = self._sentinel
        store = sentinel.channel.store(f"alarm/{alarm.key}")
        try:
            directory = self.directory()
            directory.write_record(record)
            directory.write_text(f"rank_{record.rank}/timeline.json", json.dumps(sentinel.timeline, indent=1))
            if is_judge and verdict is not None and directory.write_verdict(verdict):
                rules = {"timeout_s": self._rules.timeout_s, "allowed": [list(one) for one in self._rules.allowed]}
                directory.write_run({"kind": SENTINEL, "domain": sentinel.domain} | rules)
                publish(verdict, directory, Console(stderr=True), os.environ, command="sentinel")
        except TpCompileError as error:
            logger.error("no report: {}", error)
            if is_judge and verdict is not None:
                logger.error("rank divergence: {}", verdict.summary)
        if is_judge:
            store.put("published", True)
        else:
            store.wait("published", timeout_s=_PUBLISH_S)
        for rank in alarm.gone:
            forget((sentinel.channel.process_of(rank) or {}).get("black_box", ""))
        sentinel.shutdown.exit_code = verdict.exit_code if verdict is not None else ExitCode.FAIL
        self.let_the_first_go()
        sentinel.shutdown.leave(sentinel.shutdown.exit_code)
        sentinel.settled(alarm.position, verdict, is_red=True)

    def directory(self) -> RunDir:
        """Where all ranks write their reports. Raises PreflightError when it cannot be written."""
        return RunDir.create(self._sentinel.channel.run_dir(str(self._run_dir or _default_dir())))

    def keep_traceback(self, text: str) -> None:
        """Write it down before anything else may go wrong."""
        try:
            self.directory().write_text(f"rank_{self._sentinel.rank}/traceback.txt", text)
        except TpCompileError as error:
            logger.error("the traceback of rank {} is not kept: {}", self._sentinel.rank, error)

    def let_the_first_go(self) -> None:
        """Stay until the first rank that an exception ends has ended, for torchrun blames who ends first."""
        channel = self._sentinel.channel
        first = channel.first_raised()
        if first is None or first == self._sentinel.rank:
            return
        process = channel.process_of(first)
        if process is not None:
            stay_until_gone(lambda: process_state(process["pid"], process["host"]), lambda: channel.has_closed(first))

    def _present(self, alarm: Alarm) -> Sequence[int]:
        absent = {*self._sentinel.left, *alarm.gone}
        return [rank for rank in self._sentinel.channel.members if rank not in absent]

    # What the exchange asks of the other ranks.

    def last_seen(self, rank: int) -> str:
        """What is known of a silent rank."""
        return "its process died" if self.is_gone(rank) else "unknown"

    def is_gone(self, rank: int) -> bool:
        """True when the rank's process is dead or stopped."""
        found = self._sentinel.channel.process_of(rank)
        return found is not None and process_state(found["pid"], found["host"]) in ("dead", "stopped")


def is_grave(verdict: Verdict, *, kernels: Kernels) -> bool:
    """True for what must end the job.

    Environments that differ do not while programs agree; the parity handshake is for them. Nor, with `kernels="warn"`,
    do kernels that each rank chose by its own timings: the same program, rounded otherwise.
    """
    red = [d for d in verdict.divergences if d.is_red]
    mild = [d for d in red if d.layer == Layer.ENVIRONMENT or (kernels == "warn" and d.is_choice)]
    grave = [d for d in red if d not in mild]
    said_by = {f"{layer} " for d in mild for layer in (d.layer, *d.consequences)}
    said_by -= {f"{layer} " for d in grave for layer in (d.layer, *d.consequences)}
    failed = [c for c in verdict.checks if c.status == Status.FAIL]
    return len(mild) < len(red) or any(not c.name.startswith((f"{Layer.ENVIRONMENT} ", *said_by)) for c in failed)


def _default_dir() -> str:
    return f"runs/{datetime.now(UTC):%Y%m%dT%H%M%S}-sentinel"
