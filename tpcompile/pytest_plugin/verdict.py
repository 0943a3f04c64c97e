"""Verdict -> the text of a failed test."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

from rich.console import Console

from tpcompile.evidence.records import Verdict
from tpcompile.report import terminal

_WIDTH = 100


def verdict_text(verdict: Verdict, run: Path | None) -> str:
    """The summary in the first line, then the whole verdict; `run` is its run directory, for the replay command."""
    written = io.StringIO()
    console = Console(file=written, width=_WIDTH, color_system=None)
    terminal.render(verdict, console, run=run, command="check")
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines())
    return f"{verdict.summary}\n\n{text}"


def replay(run: Path) -> str:
    """How to judge the run again."""
    return f"replay: tpcompile compare {shlex.quote(str(run))}"
