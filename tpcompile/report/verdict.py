"""A verdict that prints, publishes and raises: what `tpcompile.check` returns."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
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


class ReportedVerdict(Verdict):
    """A verdict on a program of the user's own. All ranks have the same one; the first rank reports it."""

    _evidence: Evidence = PrivateAttr()

    @staticmethod
    def of(verdict: Verdict, evidence: Evidence) -> ReportedVerdict:
        """The verdict, with the evidence of this rank."""
        found = ReportedVerdict.model_construct(**dict(verdict))
        found._evidence = evidence
        return found

    @property
    def is_reporter(self) -> bool:
        """True on the rank that prints and writes the verdict."""
        return self._evidence.record.rank == 0

    def print(self, console: Console | None = None) -> None:
        """Print the verdict to `console`, by default stdout; on rank 0, nothing on the other ranks."""
        if self.is_reporter:
            show.show(self, console or consoles.stdout(), command="check")

    def __str__(self) -> str:
        """What `print` prints."""
        console = Console(file=io.StringIO(), width=160)
        show.show(self, console, command="check")
        return cast(io.StringIO, console.file).getvalue()

    def publish(self, run_dir: Path | str | None = None) -> Path:
        """Write evidence and reports, and return the run directory; every rank calls it.

        Each rank writes its record; rank 0 also verdict.json, junit.xml and, in GitHub Actions, the step summary and
        annotations. `tpcompile compare RUN_DIR` judges it again. `run_dir` is by default
        runs/<utc time>-check-<id>. Raises PreflightError when it cannot be written, and on rank 0 DirectoryTakenError
        when it holds a verdict.
        """
        directory = self._write_evidence(run_dir)
        if self.is_reporter:
            publish.write(self, directory, Console(), os.environ)
        return directory.path

    def _write_evidence(self, run_dir: Path | str | None) -> RunDir:
        """What `publish` writes for `tpcompile compare`, without the reports."""
        evidence = self._evidence
        directory = RunDir.create(run_dir or evidence.run_dir)
        if self.is_reporter and directory.holds_run():
            raise DirectoryTakenError(directory.path)
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
            directory.write_verdict(self)
        return directory

    def raise_for_status(self) -> Self:
        """Raise DivergenceError, with the exit code of the verdict, unless it is green; else return it."""
        if self.exit_code != ExitCode.PASS:
            error = DivergenceError(self.summary)
            error.exit_code = ExitCode(self.exit_code)
            raise error
        return self
