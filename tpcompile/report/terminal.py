"""Verdict -> rich tables and panels on a console."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tpcompile.evidence.lead import cause_text, who_text
from tpcompile.evidence.records import Check, CheckId, Divergence, Lead, Status, UserLine, Verdict
from tpcompile.report import findings
from tpcompile.report.wording import (
    accepted,
    cause_lines,
    failed,
    groups_text,
    headline,
    item_text,
    mode_title,
    modes,
    named_ranks,
    outcome,
    plain,
    red,
)


@dataclass(frozen=True)
class Limits:
    """How much of a verdict is printed; the rest is counted."""

    groups: int = 4
    """Groups of ranks side by side in one panel."""
    panels: int = 3
    """Differences in full."""
    details: int = 8
    """Lines below a failed check, and lines of accepted differences."""
    rows: int = findings.MAX_ROWS
    """Rows of a table of taints or recompiles."""


USUAL = Limits()
WHOLE = Limits(groups=sys.maxsize, panels=sys.maxsize, details=sys.maxsize, rows=sys.maxsize)
_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.INFO: "cyan", Status.SKIPPED: "dim"}


def render(
    verdict: Verdict, console: Console, *, run: Path | None = None, command: str = "gate", limits: Limits = USUAL
) -> None:
    """Print the verdict; `run` is its run directory, for the replay command."""
    _line(console, f"tpcompile {command}: {headline(verdict)}", "bold")
    if verdict.lead is not None:
        console.print(lead_text(verdict.lead))
    for mode in modes(verdict):
        console.print()
        mine = [check for check in verdict.checks if check.mode == mode]
        console.print(_table(mode, [check for check in mine if _is_told(check)]))
        for line in folded(mine):
            _line(console, line, "dim")
    console.print()
    _facts(verdict, console)
    for check in failed(verdict):
        has_more = check.details or check.line
        if has_more and check.id != CheckId.LAYER:  # a layer's difference has a panel
            console.print(_failure(check, limits))
    divergences = red(verdict)
    for number, divergence in enumerate(divergences[: limits.panels], start=1):
        console.print(panel(divergence, f"difference {number} of {len(divergences)}", limits))
    _more(console, len(divergences) - limits.panels, "differences")
    for table in findings.tables(verdict, max_rows=limits.rows):
        console.print(table)
        console.print()
    _accepted(verdict, console, limits)
    for text in last_lines(verdict):
        console.print(text)
    if run is not None:
        replay = f"replay: tpcompile compare {plain(shlex.quote(str(run)))}"
        console.print(Text(replay, style="dim"), soft_wrap=True)


def last_lines(verdict: Verdict) -> list[Text]:
    """The outcome and what to do first."""
    style = "bold green" if verdict.exit_code == 0 else "bold red"
    lines = [f"{outcome(verdict)}: {plain(verdict.summary)}"]
    if verdict.lead is not None and verdict.lead.do_first:
        lines.append(f"do first: {plain(verdict.lead.do_first)}")
    return [Text(line, style=style, overflow="fold") for line in lines]


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style, overflow="fold"))


def lead_text(lead: Lead) -> Group:
    """Cause, ranks, the user's line and what to do first, on the first screen."""
    parts: list[RenderableType] = [Text(plain(cause_text(lead)), style="bold red", overflow="fold")]
    who = who_text(lead)
    if who:
        parts.append(_indented(Text(who, style="bold")))
    parts += _source(lead.line)
    if lead.do_first:
        parts.append(_indented(Text(f"do first: {plain(lead.do_first)}", overflow="fold")))
    return Group(*parts)


def _is_told(check: Check) -> bool:
    """True for a check with a row of its own: it passed or failed by itself."""
    return check.status in (Status.PASS, Status.FAIL) and not check.is_consequence


def folded(checks: Sequence[Check]) -> Iterator[str]:
    """Consequences, skipped and informative checks, a line for each kind."""
    consequences = [check.name for check in checks if check.is_consequence]
    skipped = [check.name for check in checks if check.status == Status.SKIPPED]
    noted = [f"{check.name}: {check.observed}" for check in checks if check.status == Status.INFO]
    for title, names in (("follows from it", consequences), ("not judged", skipped), ("noted", noted)):
        if names:
            yield f"{title}: {plain('; '.join(names))}"


def _table(mode: str, checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title, table.title_justify, table.title_style = mode_title(mode), "left", "bold"
    for heading in ("check", "expected", "observed"):
        table.add_column(heading, overflow="fold")
    table.add_column("status", no_wrap=True)
    for check in checks:
        status = Text(check.status.value.upper(), style=_STYLES[check.status])
        table.add_row(*(Text(plain(t)) for t in (check.name, check.expected, check.observed)), status)
    return table


def equal_ranks(verdict: Verdict) -> Iterator[Text]:
    """Which ranks of each domain have the same."""
    for domain, groups in sorted(verdict.domains.items()):
        style = "" if len(groups) < 2 else "bold red"
        note = " (all equal)" if len(groups) == 1 else ""
        yield Text(f"equal ranks in {plain(domain)}: {groups_text(groups)}{note}", style=style, overflow="fold")


def _facts(verdict: Verdict, console: Console) -> None:
    for line in equal_ranks(verdict):
        console.print(line)
    if verdict.timings_ms:
        times = ", ".join(f"{plain(mode)} {ms:.3g}" for mode, ms in sorted(verdict.timings_ms.items()))
        _line(console, f"median ms per call: {times}")


def _failure(check: Check, limits: Limits) -> Group:
    parts: list[RenderableType] = [Text(f"{mode_title(check.mode)}, {plain(check.name)}", style="red")]
    if check.ranks:
        parts.append(_indented(Text(named_ranks(check.ranks))))
    shown = list(check.details[: limits.details])
    if len(check.details) > limits.details:
        shown.append(f"and {len(check.details) - limits.details} more")
    details = [_indented(Text(plain(detail), overflow="fold")) for detail in shown]
    return Group(*parts, *_source(check.line), *details)


def panel(divergence: Divergence, title: str, limits: Limits) -> Panel:
    """One difference in full: where, why, both sides, what to do."""
    head = [plain(divergence.title), f"layer {divergence.layer.value}: {divergence.cls.value}", _where(divergence)]
    parts: list[RenderableType] = [Text(line, overflow="fold") for line in head if line]
    parts += [Text(line, overflow="fold") for line in cause_lines(divergence)]
    lines = {g.line for g in divergence.groups}
    for group in divergence.groups[: limits.groups]:
        parts.append(Text(named_ranks(group.ranks), style="bold"))
        parts.append(_indented(Text(item_text(group.item), style="cyan", overflow="fold")))
        parts += _source(group.line) if len(lines) > 1 else []
    hidden = divergence.groups[limits.groups :]
    if hidden:
        parts.append(Text(f"and {len(hidden)} more groups: {groups_text(g.ranks for g in hidden)}"))
    if len(lines) == 1 and (line := lines.pop()) is not None:
        parts += [Text("all of them at", style="bold"), *_source(line)]
    if divergence.advice:
        parts.append(Text(f"what to do: {plain(divergence.advice)}", style="bold", overflow="fold"))
    return Panel(Group(*parts), title=title, title_align="left", border_style="red", box=box.ROUNDED)


def _where(divergence: Divergence) -> str:
    domain = f"domain {divergence.domain}" if divergence.domain else ""
    where = ", ".join(plain(part) for part in (divergence.where, domain) if part)
    return f"in {where}" if where else ""


def _source(line: UserLine | None) -> list[Padding]:
    if line is None:
        return []
    code = [_indented(Text(plain(line.code.strip()), overflow="fold"), 4)] if line.code.strip() else []
    return [_indented(Text(plain(str(line)), style="dim", overflow="fold")), *code]


def _indented(text: Text, by: int = 2) -> Padding:
    return Padding(text, (0, 0, 0, by))


def _accepted(verdict: Verdict, console: Console, limits: Limits) -> None:
    divergences = accepted(verdict)
    if not divergences:
        return
    _line(console, "accepted differences:", "bold")
    for d in divergences[: limits.details]:
        ranks = groups_text(g.ranks for g in d.groups)
        reason = f"; {plain(d.advice)}" if d.advice else ""
        text = f"{d.cls.value}, {d.layer.value}: {plain(d.title)} (ranks {ranks}){reason}"
        console.print(_indented(Text(text, overflow="fold")))
    _more(console, len(divergences) - limits.details, "accepted differences")


def _more(console: Console, number: int, what: str) -> None:
    """What a screen has no room for."""
    if number > 0:
        _line(console, f"and {number} more {what}: verdict.json, or --json FILE, holds them all", "dim")
