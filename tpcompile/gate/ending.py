"""What this rank has observed -> exchanged with the other ranks, judged, published, and the exit code of the run."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tpcompile.config import JobConfig
from tpcompile.errors import ExitCode, PreflightError, TpCompileError
from tpcompile.evidence.records import Check, CheckId, Status, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.last_state import LastState, forget_dead
from tpcompile.gate.measurements import GateDigest
from tpcompile.gate.record import Evidence
from tpcompile.gate.replay import gate_rules
from tpcompile.gate.status import StatusBoard
from tpcompile.node import is_first_here
from tpcompile.ranks.exchange import Exchange
from tpcompile.ranks.recorded import record_side
from tpcompile.ranks.store import RankStore
from tpcompile.report.publish import publish
from tpcompile.report.show import Amount

_LAST_WORDS_TIMEOUT_S = 8.0
_PUBLISHED = "published"


class Output(NamedTuple):
    """What this rank prints, and where."""

    quiet: bool
    """Print nothing; the launcher prints the report."""
    amount: Amount
    console: Console


@dataclass(frozen=True)
class Ending:
    """The end of one rank's run: with the verdict of all ranks, or early, on the watch's thread."""

    evidence: Evidence
    output: Output
    board: StatusBoard
    last_state: LastState
    watch_store: RankStore
    """A client that only the watch's thread uses."""
    others: StatusBoard
    """States of the other ranks, through that client."""

    def verdict(self, store: RankStore) -> Verdict | None:
        """Exchange digests with all ranks. Raises PreflightError when the record cannot be written."""
        record = self.evidence.written()
        config = self.evidence.config
        exchange = self._exchange(store, timeout_s=config.gate.store_timeout_s)
        flow_of = partial(self.last_state.flow_of, store=store)
        host_of = StatusBoard(self.evidence.directory, store).host_of
        side = record_side(record, gate_rules(config), kind=GateDigest, flow_of=flow_of, host_of=host_of)
        return exchange.verdict(side)

    def last_words(self, check: Check) -> ExitCode:
        """Write the record so far, judge with the failed check, return the exit code; runs on the watch's thread."""
        self.board.publish("stopped" if check.id == CheckId.ALIVE else "failed", error=check.observed)
        if self.evidence.session is None:
            return ExitCode.FAIL
        problems = self.last_state.explained(check, self.watch_store, self.others)
        try:
            record = self.evidence.written()
        except PreflightError as error:
            return self.unwritten(error, self.watch_store, after=check.observed)
        exchange = self._exchange(self.watch_store, timeout_s=_LAST_WORDS_TIMEOUT_S)
        flow_of = partial(self.last_state.flow_of, store=self.watch_store)
        rules = gate_rules(self.evidence.config)
        side = record_side(
            record, rules, problems=problems, kind=GateDigest, flow_of=flow_of, host_of=self.others.host_of
        )
        try:
            verdict = exchange.verdict(side)
        except RuntimeError:  # the store does not respond: judge with this rank's digest alone
            verdict = side.judged_alone(self._last_statuses())
        self.last_state.close()
        forget_dead(self.watch_store, self.others)
        return self.publish(verdict, judge=verdict is not None and self.evidence.directory.read_verdict() is None)

    def publish(self, verdict: Verdict | None, *, judge: bool) -> ExitCode:
        """Write the verdict once; the rank that judged also reports it."""
        if verdict is None:
            return ExitCode.FAIL
        directory, output = self.evidence.directory, self.output
        is_first = judge and directory.write_verdict(verdict)
        if verdict.hosts:
            self._write_for_node(verdict, judge=judge)
        if is_first and not output.quiet:
            publish(verdict, directory, output.console, os.environ, amount=output.amount)
        return ExitCode(verdict.exit_code)

    def _write_for_node(self, verdict: Verdict, *, judge: bool) -> None:
        """Write the verdict to the folder of this node, where the judge, which comes first, has a different one."""
        with suppress(RuntimeError):
            if judge:
                self.watch_store.put(_PUBLISHED, True)
            elif is_first_here():
                self.watch_store.wait(_PUBLISHED, timeout_s=_LAST_WORDS_TIMEOUT_S)
        if is_first_here():
            self.evidence.write_for_node(verdict)

    def unwritten(self, error: PreflightError, store: RankStore, *, after: str = "") -> ExitCode:
        """End a run whose record cannot be written: no verdict, but a state for the launcher or one line on stderr."""
        self.board.publish("unwritten", error="; ".join(filter(None, (after, str(error)))))
        if not self.output.quiet:
            is_first = True  # on every rank when the store does not respond
            with suppress(RuntimeError):
                is_first = store.put_first("unwritten", store.rank, int) in (store.rank, None)
            if is_first:
                print_error(error)
        return error.exit_code

    def _exchange(self, store: RankStore, *, timeout_s: float) -> Exchange:
        others = StatusBoard(self.evidence.directory, store)
        return Exchange(store, range(store.world_size), others=others, timeout_s=timeout_s, keeps=True)

    def _last_statuses(self) -> dict[int, str]:
        """The last state of each other rank, as the run directory has it; used when the store does not respond."""
        statuses = self.evidence.directory.read_statuses()
        states = {one.rank: f"{one.state} in phase {one.phase} on {one.host}" for one in statuses}
        env = self.evidence.env
        return {rank: states.get(rank, "never") for rank in range(env.world_size) if rank != env.rank}


# A run that cannot start, or whose record cannot be written


def refuse(error: TpCompileError, config: JobConfig, run_dir: Path | str | None, *, rank: int, quiet: bool) -> ExitCode:
    """End a run that cannot start: one line on stderr, and a verdict for the launcher if the directory is writable."""
    check = Check(
        id=CheckId.CAN_START, mode=config.modes[0], status=Status.FAIL, expected="no error", observed=str(error)
    )
    verdict = Verdict(
        status=Status.FAIL, exit_code=error.exit_code, world_size=int(os.environ.get("WORLD_SIZE", "1")),
        preset=config.preset, modes=config.modes, summary=str(error), checks=(check,),
    )  # fmt: skip
    is_first = rank == 0
    if run_dir is not None:
        with suppress(TpCompileError):  # rank 0 may be the one that is missing
            is_first = RunDir.create(run_dir).write_verdict(verdict)
    if is_first and not quiet:
        print_error(error)
    return error.exit_code


def print_error(error: TpCompileError) -> None:
    """One line on stderr."""
    with suppress(OSError):
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
