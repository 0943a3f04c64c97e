"""Verdict -> at most a screen: the lead first and last, one difference in full, the rest in files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from tpcompile.evidence.records import Check, Status, Verdict
from tpcompile.report import terminal
from tpcompile.report.wording import accepted, failed, headline, red

MAX_LINES = 40
_BRIEF = 2
"""Lines that one folded fact may take."""
_LEAD = 9
_MAX_HEAD = 24
"""Lines before the first difference."""
_MIN_PANEL = 6
"""A difference with fewer lines than that says nothing."""
_WIDTH = 120
"""Of the report in a file."""


class Screen:
    """Lines for a console, no more than a screen; `is_cut` when it does not show all there is."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: list[list[Segment]] = []
        self.is_cut = False

    def add(self, what: RenderableType, *, at_most: int) -> None:
        """Lines of a renderable, from the first on."""
        lines = self.console.render_lines(what, pad=False)
        self.is_cut |= len(lines) > at_most
        self.lines += lines[: max(0, at_most)]

    def add_framed(self, what: RenderableType, *, at_most: int) -> None:
        """Lines of a panel; one that is too long keeps the lower edge of its frame."""
        lines = self.console.render_lines(what, pad=False)
        if len(lines) > at_most:
            lines = [*lines[: max(0, at_most - 1)], lines[-1]]
            self.is_cut = True
        self.lines += lines

    def print(self) -> None:
        """Onto the console."""
        for line in self.lines:
            self.console.print(Segments([*line, Segment.line()]), end="")


def render(verdict: Verdict, console: Console, *, command: str, folder: Path) -> None:
    """Print the verdict; what the screen has no room for is written to files in `folder`."""
    tail = Screen(console)
    for text in terminal.last_lines(verdict):
        tail.add(text, at_most=3)
    screen = _head(verdict, console, command)
    differences = red(verdict)
    has_more = len(differences) > 1
    room = MAX_LINES - len(tail.lines) - len(screen.lines) - len(_files(folder)) - has_more
    if differences and room >= _MIN_PANEL:
        first = terminal.panel(differences[0], f"difference 1 of {len(differences)}", terminal.USUAL)
        screen.add_framed(first, at_most=room)
    if has_more:
        screen.add(terminal.line(f"and {len(differences) - 1} more differences", "dim"), at_most=1)
    screen.is_cut |= tail.is_cut or _has_more(verdict)
    screen.print()
    tail.print()
    if screen.is_cut:
        for line in _written(verdict, folder, command):
            console.print(Text(line, style="dim"), soft_wrap=True)


def _head(verdict: Verdict, console: Console, command: str) -> Screen:
    screen = Screen(console)
    screen.add(Text(f"tpcompile {command}: {headline(verdict)}", style="bold"), at_most=_BRIEF)
    if verdict.lead is not None:
        screen.add(terminal.lead_text(verdict.lead), at_most=_LEAD)
    screen.add("", at_most=1)
    for line in _facts(verdict):
        screen.add(line, at_most=min(_BRIEF, _MAX_HEAD - len(screen.lines)))
    return screen


def _facts(verdict: Verdict) -> Iterator[Text]:
    """Every check in a word, then which ranks are equal; a failed one that is no layer's says what was observed."""
    yield from terminal.titled(_passed(verdict), separator=", ", style="green")
    for check in _told(verdict)[:3]:
        yield terminal.line(f"fails: {check.name}: {check.observed}", "red")
    yield from terminal.folded(verdict.checks)
    yield from terminal.equal_ranks(verdict)[:3]
    listed = accepted(verdict)
    if listed:
        yield terminal.line(f"accepted differences: {len(listed)}, the first: {listed[0].title}")


def _passed(verdict: Verdict) -> dict[str, list[str]]:
    """What holds: layers by their name, other checks by theirs."""
    names: dict[str, list[str]] = {"holds": [], "equal on all ranks": []}
    for check in verdict.checks:
        if check.status == Status.PASS:
            title, name = ("equal on all ranks", check.layer.value) if check.layer else ("holds", check.name)
            names[title].append(name)
    return names


def _told(verdict: Verdict) -> Sequence[Check]:
    """Failed checks that no difference below says."""
    return [check for check in failed(verdict) if check.layer is None]


def _has_more(verdict: Verdict) -> bool:
    """True for what a screen only counts."""
    details = [check for check in verdict.checks if check.details]
    return bool([*details, *verdict.taints, *verdict.recompiles, *red(verdict)[1:], *accepted(verdict)[1:]])


def _files(folder: Path) -> tuple[Path, Path]:
    return folder / "report.txt", folder / "verdict.json"


def _written(verdict: Verdict, folder: Path, command: str) -> list[str]:
    """Write the whole report and the verdict; where that fails, one line says so and the verdict stands."""
    report, data = _files(folder)
    text = io.StringIO()
    terminal.render(verdict, Console(file=text, width=_WIDTH), command=command, limits=terminal.WHOLE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(text.getvalue(), encoding="utf-8")
        data.write_text(verdict.to_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return [f"the rest is not written: {folder}: {error.strerror}; choose another folder with --run-dir"]
    return [f"all of it: {report}", f"as data: {data}"]
