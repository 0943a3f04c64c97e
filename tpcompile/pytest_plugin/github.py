"""Failures of tests on ranks -> annotations and the step summary, in GitHub Actions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import github

_FIELD = "tp_github"
"""Field of a report; plain JSON, which xdist hands to the process that prints."""


@dataclass(frozen=True)
class Note:
    """What GitHub shows about one cause."""

    errors: Sequence[str]
    """`::error` lines."""
    summary: str
    """Markdown."""


def note_of(report: pytest.TestReport, run_dir: Path | None, rootdir: Path) -> Note:
    """A divergence is annotated at the user's lines of its verdict; anything else at the line that raised."""
    _, _, test = report.location
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    verdict = RunDir(run_dir).read_verdict() if run_dir is not None else None
    if verdict is not None and verdict.exit_code:
        return Note(github.annotations(verdict, workspace), github.summary(verdict, title=test))
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    line = UserLine(file=str(rootdir / crash.path), line=crash.lineno) if crash is not None else None
    return Note([github.error(line, test, text, workspace)], github.section(test, text))


def attach(report: pytest.TestReport, run_dir: Path | None, rootdir: Path) -> None:
    """Add the note for GitHub to the report."""
    if github.is_actions(os.environ):
        setattr(report, _FIELD, vars(note_of(report, run_dir, rootdir)))


def write(reports: Sequence[Any], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Append to the step summary; return at most ten lines to print: the first of each test comes before a second."""
    notes = [Note(**getattr(report, _FIELD)) for report in reports if hasattr(report, _FIELD)]
    turns = zip_longest(*(note.errors for note in notes))
    errors = list(dict.fromkeys(error for turn in turns for error in turn if error is not None))[: github.MAX_ERRORS]
    return errors + github.append_summary("\n".join(note.summary for note in notes), environ)
