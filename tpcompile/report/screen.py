"""Verdict -> at most one screen: the lead first and last, one difference in full, the rest in files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from tpcompile.evidence.records import Status, Verdict
from tpcompile.report import lines, terminal
from tpcompile.report.wording import accepted, failed, guard_line, headline, red, red_by_kind

MAX_LINES = 40
_BRIEF = 2
"""Most lines of one fact; the rest of it is cut."""
_LEAD = 9
_MAX_HEAD = 24
"""Most lines before the first difference."""
_MIN_PANEL = 6
"""Fewest lines in which a difference is shown; with less room it is left out."""


@dataclass
class Screen:
    """Lines for a console; `is_cut` when lines were left out."""

    console: Console
    lines: list[list[Segment]] = field(default_factory=list)
    is_cut: bool = False

    def add(self, what: RenderableType, *, at_most: int) -> None:
        """Add the first lines of a renderable."""
        lines = self.console.render_lines(what, pad=False)
        self.is_cut |= len(lines) > at_most
        self.lines += lines[: max(0, at_most)]

    def add_framed(self, what: RenderableType, *, at_most: int) -> None:
        """Add the lines of a panel; when it is cut it keeps the lower edge of its frame."""
        lines = self.console.render_lines(what, pad=False)
        if len(lines) > at_most:
            lines = [*lines[: max(0, at_most - 1)], lines[-1]]
            self.is_cut = True
        self.lines += lines

    def print(self) -> None:
        """Print the lines to the console."""
        for line in self.lines:
            self.console.print(Segments([*line, Segment.line()]), end="")


def render(verdict: Verdict, console: Console, *, command: str, folder: Path, is_asked_for: bool = False) -> None:
    """Print the verdict; all of it is written to files in `folder` when it does not fit, or they are asked for."""
    if not console.is_terminal:
        _render_lines(verdict, console, command, folder, is_asked_for)
        return
    tail = Screen(console)
    for text in terminal.last_lines(verdict):
        tail.add(text, at_most=3)
    screen = _head(verdict, console, command)
    num_taken = len(screen.lines) + len(tail.lines) + len(_files(folder))
    _add_differences(screen, verdict, at_most=MAX_LINES - num_taken)
    screen.print()
    tail.print()
    is_cut = screen.is_cut or tail.is_cut or _has_more(verdict)
    if not is_cut and not is_asked_for:
        return
    for line in _written(verdict, folder, command):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _render_lines(verdict: Verdict, console: Console, command: str, folder: Path, is_asked_for: bool) -> None:
    found = lines.lines(verdict, command=command)
    is_cut = len(found) > MAX_LINES - len(_files(folder))
    if is_cut:
        last = lines.last_lines(verdict)
        num_first = MAX_LINES - len(_files(folder)) - len(last) - 1
        num_left_out = len(found) - num_first - len(last)
        found = [*found[:num_first], f"and {num_left_out} more lines in the full report", *last]
    if is_cut or is_asked_for or _has_more(verdict):
        found += _written(verdict, folder, command)
    console.file.write("".join(f"{line}\n" for line in found))


def _add_differences(screen: Screen, verdict: Verdict, *, at_most: int) -> None:
    """The first difference in full, where there is room for it, and the number of the others."""
    kinds = red_by_kind(verdict)
    num_others = sum(map(len, kinds[1:]))
    room = at_most - 1 if num_others > 0 else at_most
    if kinds and room >= _MIN_PANEL:
        first = terminal.panel(kinds[0], f"difference 1 of {len(kinds)}", terminal.USUAL, hosts=verdict.hosts)
        screen.add_framed(first, at_most=room)
    if num_others > 0:
        screen.add(terminal.line(f"and {num_others} more differences", "dim"), at_most=1)


def _head(verdict: Verdict, console: Console, command: str) -> Screen:
    screen = Screen(console)
    screen.add(Text(f"tpcompile {command}: {headline(verdict)}", style="bold"), at_most=_BRIEF)
    if verdict.lead is not None:
        screen.add(terminal.lead_text(verdict.lead, guard_line(verdict)), at_most=_LEAD)
    screen.add("", at_most=1)
    for line in _facts(verdict):
        screen.add(line, at_most=min(_BRIEF, _MAX_HEAD - len(screen.lines)))
    return screen


def _facts(verdict: Verdict) -> Iterator[Text]:
    """The checks by outcome, what the first failed ones observed, then the groups of equal ranks."""
    yield from terminal.titled(_passed(verdict), separator=", ", style="green")
    # A layer's difference is shown in full.
    outside_layers = [check for check in failed(verdict) if check.layer is None]
    for check in outside_layers[:3]:
        yield terminal.line(f"fails: {check.name}: {check.observed}", "red")
    yield from terminal.folded(verdict.checks)
    yield from terminal.equal_ranks(verdict)[:3]
    listed = accepted(verdict)
    if listed:
        yield terminal.line(f"accepted differences: {len(listed)}, the first: {listed[0].title}")


def _passed(verdict: Verdict) -> dict[str, list[str]]:
    """Names of the checks that passed; those of layers apart, under the name of the layer."""
    holds: list[str] = []
    equal: list[str] = []
    for check in verdict.checks:
        if check.status != Status.PASS:
            continue
        if check.layer:
            equal.append(check.layer.value)
        else:
            holds.append(check.name)
    return {"holds": holds, "equal on all ranks": equal}


def _has_more(verdict: Verdict) -> bool:
    """True when the verdict holds anything that the screen only counts."""
    details = [check for check in verdict.checks if check.details]
    return bool([*details, *verdict.taints, *verdict.recompiles, *red(verdict)[1:], *accepted(verdict)[1:]])


def _files(folder: Path) -> tuple[Path, Path]:
    return folder / "report.txt", folder / "verdict.json"


def _written(verdict: Verdict, folder: Path, command: str) -> list[str]:
    """Write the whole report and the verdict; return the lines that say where, or why they could not be written."""
    report, data = _files(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(terminal.whole(verdict, command), encoding="utf-8")
        data.write_text(verdict.to_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return [
            f"the full report was not written: {folder}: {error.strerror}; choose a different folder with --run-dir"
        ]
    return [f"full report: {report}", f"as JSON: {data}"]
