"""Verdict + console -> its report: tables of at most 200 lines on a terminal, a line per check elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console, Group
from rich.segment import Segment, Segments
from rich.text import Text

from tpcompile.errors import PreflightError
from tpcompile.evidence.judgement.leading import short_summary
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import lines, terminal
from tpcompile.report.stdout import forgiving

MAX_LINES = 200
"""Most lines that a report takes on a terminal; the rest of it is in files."""
_REPORT = "report.txt"

Amount = Literal["all", "last", "json"]
"""`all` of the report, its `last` lines, or the verdict as `json`."""


def amount(*, quiet: bool, json: bool) -> Amount:
    """What `-q` and `--json` ask for; the JSON where both do."""
    if json:
        return "json"
    return "last" if quiet else "all"


def show(
    verdict: Verdict, console: Console, *, run: Path | None = None, command: str = "gate", amount: Amount = "all"
) -> None:
    """Print the verdict; `run` is its run directory, for the replay command and for what does not fit.

    A stdout that is closed or on a full disk costs the report, not the exit code.
    """
    with forgiving():
        _show(verdict, console, run, command, amount)


def _show(verdict: Verdict, console: Console, run: Path | None, command: str, amount: Amount) -> None:
    if amount == "json":
        console.file.write(verdict.to_json(indent=1) + "\n")
        return
    if not console.is_terminal:
        found = lines.lines(verdict, command=command) if amount == "all" else lines.last_lines(verdict)
        console.file.write("".join(f"{line}\n" for line in [*found, *terminal.replay(run, verdict)]))
        return
    if amount == "all":
        _print_body(verdict, console, run, command)
    console.print(Group(*terminal.last_lines(verdict, short_summary(verdict) if amount == "all" else "")))
    for line in terminal.replay(run, verdict):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _print_body(verdict: Verdict, console: Console, run: Path | None, command: str) -> None:
    """All but the last lines, cut where it is longer than a reader scrolls."""
    body = console.render_lines(Group(*terminal.body(verdict, command, terminal.USUAL)), pad=False)
    last = console.render_lines(Group(*terminal.last_lines(verdict, short_summary(verdict))), pad=False)
    room = MAX_LINES - len(last) - len(terminal.replay(run, verdict))
    is_cut = len(body) > room
    shown = body[: room - 1] if is_cut else body
    for line in shown:
        console.print(Segments([*line, Segment.line()]), end="")
    if is_cut:
        text = f"and {len(body) - len(shown)} more lines{_where_all_is(verdict, run, command)}"
        console.print(Text(text, style="dim"), soft_wrap=True)


def _where_all_is(verdict: Verdict, run: Path | None, command: str) -> str:
    """Write the whole report to the run directory, and say where it is."""
    if run is None:
        return ": `publish` of the verdict writes all of them"
    try:
        path = RunDir(run).write_text(_REPORT, terminal.whole(verdict, command))
    except PreflightError as error:
        return f", not written: {error}"
    return f": {path}"
