"""A verdict that prints, publishes and raises: what `tpcompile.check` and the preflight checks return."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self, cast

from pydantic import PrivateAttr
from rich.console import Console

from tpcompile.errors import DirectoryTakenError, DivergenceError, ExitCode
from tpcompile.evidence.judgement.verdict import CAPTURED
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import console as consoles
from tpcompile.report import publish, show


class Evidence(NamedTuple):
    """What this rank knows beside the verdict."""

    record: RankRecord
    run_dir: Path
    """The run directory that the ranks agreed on; `publish` may be given a different one."""
    timeout_s: float
    allowed: Sequence[tuple[str, str, str]]
    num_breaks: int | None = 0
    alone: bool = False


class ShownVerdict(Verdict):
    """A verdict that all ranks which were compared have alike; the first of them reports it."""

    _is_reporter: bool = PrivateAttr(False)
    _command: str = PrivateAttr("")
    _choose_run_dir: Callable[[], Path] = PrivateAttr()

    @classmethod
    def shown(cls, verdict: Verdict, *, is_reporter: bool, command: str, choose_run_dir: Callable[[], Path]) -> Self:
        """The verdict, as what `command` prints; `choose_run_dir` gives the directory that all its ranks agree on."""
        found = cast("Self", cls.model_construct(**dict(verdict)))
        found._is_reporter, found._command, found._choose_run_dir = is_reporter, command, choose_run_dir
        return found

    @property
    def is_reporter(self) -> bool:
        """True on the rank that prints and writes the verdict: the first one that was compared."""
        return self._is_reporter

    def print(self, console: Console | None = None) -> None:
        """Print the verdict to `console`, by default stdout; on the first rank, nothing on the other ranks."""
        if self.is_reporter:
            show.show(self, console or consoles.stdout(), command=self._command)

    def __str__(self) -> str:
        """What `print` prints."""
        console = Console(file=io.StringIO(), width=160)
        show.show(self, console, command=self._command)
        return cast(io.StringIO, console.file).getvalue()

    def publish(self, run_dir: Path | str | None = None) -> Path:
        """Write evidence and reports, and return the run directory; every rank calls it.

        Each rank writes the record of what it compiled, if there is one; `tpcompile compare RUN_DIR` then judges it
        again. The first rank writes verdict.json, junit.xml and, in GitHub Actions, the step summary and annotations.
        `run_dir` is by default runs/<utc time>-<kind>-<id>, where kind is `check` or `preflight`. Raises PreflightError
        when it cannot be written, and on the first rank DirectoryTakenError when it holds a verdict.
        """
        directory = self._write_evidence(run_dir)
        if self.is_reporter:
            publish.write(self, directory, Console(), os.environ)
        return directory.path

    def _write_evidence(self, run_dir: Path | str | None) -> RunDir:
        """What `publish` writes, without the reports."""
        directory = RunDir.create(run_dir or self._choose_run_dir())
        if self.is_reporter and directory.holds_run():
            raise DirectoryTakenError(directory.path)
        if self.is_reporter:
            directory.write_verdict(self)
        return directory

    def raise_for_status(self) -> Self:
        """Raise DivergenceError, with the exit code of the verdict, unless it is green; else return it."""
        if self.exit_code != ExitCode.PASS:
            error = DivergenceError(self.summary)
            error.exit_code = ExitCode(self.exit_code)
            raise error
        return self


class ReportedVerdict(ShownVerdict):
    """A verdict on a program of the user's own, with the evidence of this rank."""

    _evidence: Evidence = PrivateAttr()

    @staticmethod
    def of(verdict: Verdict, evidence: Evidence) -> ReportedVerdict:
        """The verdict, with the evidence of this rank."""
        is_reporter = evidence.record.rank == 0
        found = ReportedVerdict.shown(
            verdict, is_reporter=is_reporter, command="check", choose_run_dir=lambda: evidence.run_dir
        )
        found._evidence = evidence
        return found

    def _write_evidence(self, run_dir: Path | str | None) -> RunDir:
        """What `tpcompile compare` reads."""
        directory = super()._write_evidence(run_dir)
        evidence = self._evidence
        directory.write_record(evidence.record)
        if self.is_reporter:
            facts = {
                "kind": CAPTURED,
                "timeout_s": evidence.timeout_s,
                "allowed": list(evidence.allowed),
                "num_breaks": evidence.num_breaks,
                "alone": evidence.alone,
            }
            directory.write_run(facts)
        return directory
