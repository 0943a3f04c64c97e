"""Verdict -> rich tables and panels on a console."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import quote

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tpcompile.evidence.judgement import equal_ranks as equality
from tpcompile.evidence.judgement.leading import blamed_text, cause_text, lead_ranks_text, short_summary
from tpcompile.evidence.records import Check, CheckId, Divergence, Lead, RankGroup, Status, UserLine, Verdict
from tpcompile.evidence.records.base import known
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.text.hosts import on_hosts
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.timeline.conclude import led_to_text, side_text, usual_text
from tpcompile.report import findings
from tpcompile.report.wording import (
    MAX_PLACES,
    about_lines,
    accepted_lines,
    by_mode,
    detail_lines,
    do_first_lines,
    failed,
    groups_text,
    guard_line,
    headline,
    item_text,
    mode_title,
    more_alike,
    more_lines,
    observed_text,
    outcome,
    plain,
    red_by_kind,
)


@dataclass(frozen=True)
class Limits:
    """How much of a verdict is printed; the rest is counted."""

    groups: int = 4
    """Groups of ranks side by side in one panel."""
    panels: int = 3
    """Differences that are printed in full."""
    details: int = 8
    """Lines below a failed check, and number of accepted differences."""
    rows: int = findings.MAX_ROWS
    """Rows of a table of taints or recompiles."""
    places: int = MAX_PLACES
    """Compiles that are named of equal differences."""
    notes: int = 0
    """Lines below an informative check."""


USUAL = Limits()
WHOLE = Limits(
    groups=sys.maxsize, panels=sys.maxsize, details=sys.maxsize, rows=sys.maxsize, places=sys.maxsize, notes=sys.maxsize
)
_WIDTH = 120
"""Columns of the report in a file."""
_STYLES = {Status.PASS: "green", Status.FAIL: "bold red"}
"""Style of a check that has its own row in the table; the others are folded into lines."""


def render(
    verdict: Verdict, console: Console, *, run: Path | None = None, command: str = "gate", limits: Limits = USUAL
) -> None:
    """Print the verdict; `run` is its run directory, for the replay command."""
    console.print(Group(*body(verdict, command, limits), *last_lines(verdict, short_summary(verdict))))
    for text in replay(run, verdict):
        console.print(Text(text, style="dim"), soft_wrap=True)


def whole(verdict: Verdict, command: str) -> str:
    """All of the report, as text for a file."""
    text = io.StringIO()
    render(verdict, Console(file=text, width=_WIDTH), command=command, limits=WHOLE)
    return text.getvalue()


def replay(run: Path | None, verdict: Verdict) -> list[str]:
    """The commands that judge the run again, and make a page of it; empty for one without a directory.

    Where nodes have a folder each, which of them has the evidence of which ranks.
    """
    if run is None:
        return []
    where = plain(shlex.quote(str(run)))
    here = {path.parent.name for path in RunDir(run).rank_files("record.json")}
    away = {
        host: ranks for host, ranks in verdict.hosts.items() if here and here.isdisjoint(f"rank_{one}" for one in ranks)
    }
    folders = " ".join([where, *(f"COPY-OF-{host}" for host in away)])
    there = [f"evidence of {named_ranks(ranks)}: in {where} on {host}" for host, ranks in away.items()]
    return [*there, f"replay: tpcompile compare {folders}", f"page: tpcompile report {where}"]


def body(verdict: Verdict, command: str, limits: Limits) -> Iterator[RenderableType]:
    """All of the report but its last lines."""
    yield line(f"tpcompile {command}: {headline(verdict)}", "bold")
    if verdict.lead is not None:
        yield lead_text(verdict.lead, guard_line(verdict))
    for mode, checks in by_mode(verdict).items():
        notes: list[RenderableType] = []
        for check in checks:
            if check.status == Status.INFO:
                notes += [_indented(line(detail, "dim")) for detail in check.details[: limits.notes]]
        yield Group("", _table(mode, checks, verdict.lead), *folded(checks), *notes)
    times = [f"{mode} {ms:.3g}" for mode, ms in sorted(verdict.timings_ms.items())]
    timings = titled({"median ms per call": times}, separator=", ", style="")
    yield Group("", *equal_ranks(verdict), *timings)
    yield from _failures(verdict, limits)
    yield from _panels(verdict, limits)
    for table in findings.tables(verdict, max_rows=limits.rows):
        yield Group(table, "")
    yield from _accepted(verdict, limits)


def last_lines(verdict: Verdict, summary: str = "") -> list[Text]:
    """The outcome, what to do first, and where there is more about the cause; alone with the whole summary."""
    style = "bold green" if verdict.exit_code == 0 else "bold red"
    outcome_line = line(f"{outcome(verdict)}: {summary or verdict.summary}", style)
    more = [line(text, "dim") for text in more_lines(verdict.lead)]
    return [outcome_line, *(line(text, style) for text in do_first_lines(verdict.lead)), *more]


def line(text: str, style: str = "") -> Text:
    """Text that is folded at the width of the console, without control characters."""
    return Text(plain(text), style=style, overflow="fold")


def lead_text(lead: Lead, guard: str = "") -> Group:
    """Cause, ranks, the guard that explains it, the user's line and what to do first, on the first screen."""
    cause, who = line(cause_text(lead), "bold red"), lead_ranks_text(lead)
    ranks = [_indented(line(who, "bold"))] if who else []
    ranks += [_indented(line(guard))] if guard else []
    advice = [_indented(line(text)) for text in do_first_lines(lead)]
    if lead.parted is None:
        return Group(cause, *ranks, *_source(lead.line), *advice)
    sides: list[RenderableType] = []
    for side in lead.parted.sides:
        sides.append(_indented(line(f"{side_text(side)}{usual_text(lead.parted)}")))
        sides += _code(side.line) if side.line != lead.line else []
    sides += [_indented(line(led_to_text(lead.parted).removeprefix("; ")))] if lead.parted.led_to else []
    if not lead.consequence:  # content differs, and these lines made it differ
        parted = [line("the ranks parted at")] if lead.seen_at is not None else []
        return Group(cause, *ranks, *_source(lead.seen_at), *parted, *_source(lead.line), *sides, *advice)
    so = line(f"so {lead.consequence}")
    return Group(line(lead.cause.value, "bold red"), *ranks, *_source(lead.line), *sides, so, *advice)


def folded(checks: Sequence[Check]) -> list[Text]:
    """Consequences, skipped and informative checks, one line for each kind."""
    follows: list[str] = []
    not_judged: list[str] = []
    noted: list[str] = []
    for check in checks:
        if check.is_consequence:
            follows.append(check.name)
        elif check.status == Status.SKIPPED:
            not_judged.append(check.name)
        elif check.status == Status.INFO:
            noted.append(f"{check.name}: {check.observed}")
    names = {"follows from it": follows, "not judged": not_judged, "noted": noted}
    return titled(names, separator="; ", style="dim")


def titled(names: Mapping[str, Sequence[str]], *, separator: str, style: str) -> list[Text]:
    """`title: name, name` for every title with at least one name."""
    return [line(f"{title}: {separator.join(found)}", style) for title, found in names.items() if found]


def _table(mode: str, checks: Sequence[Check], lead: Lead | None) -> Table:
    """Table of the checks that passed, and of those that failed not only as a consequence of a different check.

    What the lead says is said once.
    """
    table = findings.empty_table(mode_title(mode), ("check", "expected", "observed"))
    table.add_column("status", no_wrap=True)
    for check in checks:
        is_folded = check.is_consequence or check.status not in _STYLES
        if not is_folded:
            style = _STYLES[check.status]
            status = Text(check.status.value.upper(), style=style)
            cells = (check.name, check.expected, observed_text(check, lead))
            findings.add_row(table, cells, status)
    return table


def equal_ranks(verdict: Verdict) -> list[Text]:
    """The groups of equal ranks of each domain."""
    return [line(text, "bold red" if is_split else "") for text, is_split in equality.equal_ranks(verdict)]


def _failures(verdict: Verdict, limits: Limits) -> Iterator[Group]:
    for check in failed(verdict):
        is_said = verdict.lead is not None and (check.observed == verdict.lead.says or check.is_consequence)
        has_more = check.details or (check.line and not is_said)
        if has_more and check.id != CheckId.LAYER:  # a layer's difference has a panel
            yield _failure(check, limits)


def _failure(check: Check, limits: Limits) -> Group:
    name = f"{mode_title(check.mode)}, {check.name}"
    title = line(name, "red")
    who = blamed_text(check.ranks, is_known=check.is_rank_known)
    ranks = [_indented(line(who))] if who else []
    found = detail_lines(check)
    shown = found[: limits.details]
    num_hidden = len(found) - len(shown)
    if num_hidden > 0:
        shown.append(f"and {num_hidden} more")
    details = [_indented(line(detail)) for detail in shown]
    source = _source(check.line)
    return Group(title, *ranks, *source, *details)


def _panels(verdict: Verdict, limits: Limits) -> Iterator[RenderableType]:
    kinds = red_by_kind(verdict)
    for number, alike in enumerate(kinds[: limits.panels], start=1):
        yield panel(alike, f"difference {number} of {len(kinds)}", limits, hosts=verdict.hosts)
    yield from _more(sum(map(len, kinds[limits.panels :])), "differences")


def panel(
    alike: Sequence[Divergence],
    title: str,
    limits: Limits,
    *,
    hosts: Mapping[str, Sequence[int]],
) -> Panel:
    """One difference in full: where it is, why, what each group of ranks has, what to do; equal ones by their place."""
    divergence = alike[0]
    head = [divergence.title, *about_lines(divergence)]
    parts: list[RenderableType] = [*map(line, head), *_sides(divergence.groups, limits, hosts)]
    parts += map(line, more_alike(alike, at_most=limits.places))
    if divergence.advice:
        parts.append(line(f"what to do: {divergence.advice}", "bold"))
    return Panel(Group(*parts), title=title, title_align="left", border_style="red", box=box.ROUNDED)


def _sides(groups: Sequence[RankGroup], limits: Limits, hosts: Mapping[str, Sequence[int]]) -> Iterator[RenderableType]:
    """What every group of ranks has, and its line; a line that all groups have in common is shown once."""
    lines = {group.line for group in groups}
    is_one_line = len(lines) == 1
    for group in groups[: limits.groups]:
        yield line(f"{named_ranks(group.ranks)}{on_hosts(group.ranks, hosts)}", "bold")
        yield _indented(line(item_text(group.item), "cyan"))
        if not is_one_line:
            yield from _source(group.line)
    hidden = groups[limits.groups :]
    if hidden:
        ranks = groups_text(group.ranks for group in hidden)
        yield line(f"and {len(hidden)} more groups: {ranks}")
    common = known(lines)
    if is_one_line and common:
        yield line("all of them at", "bold")
        yield from _source(common[0])


def _source(source: UserLine | None) -> list[Padding]:
    """A line of source, a link to its file in terminals that have links, and the code on it where it is known."""
    if source is None:
        return []
    place = line(str(source), "dim")
    if PurePath(source.file).is_absolute():
        place.stylize(Style(link=f"file://{quote(source.file)}"))
    return [_indented(place), *_code(source)]


def _code(source: UserLine | None) -> list[Padding]:
    code = source.code.strip() if source is not None else ""
    return [_indented(line(code), 4)] if code else []


def _indented(text: Text, by: int = 2) -> Padding:
    return Padding(text, (0, 0, 0, by))


def _accepted(verdict: Verdict, limits: Limits) -> Iterator[RenderableType]:
    lines = accepted_lines(verdict)
    if not lines:
        return
    yield line("accepted differences:", "bold")
    for text in lines[: limits.details]:
        yield _indented(line(text))
    yield from _more(len(lines) - limits.details, "accepted differences")


def _more(number: int, what: str) -> list[Text]:
    """The number of things that are not shown, and where they are; nothing when all are shown."""
    text = f"and {number} more {what}: verdict.json or --json FILE has all of them"
    return [line(text, "dim")] if number > 0 else []
