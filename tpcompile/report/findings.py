"""Taints and recompiles of a verdict -> rich tables below its checks."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from tpcompile.evidence.records import RecompileCause, Taint, UserLine, Verdict
from tpcompile.evidence.taint import value_text
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.report.wording import plain

MAX_ROWS = 5
"""Rows per table; the others are counted, verdict.json holds them all."""


def tables(verdict: Verdict, *, max_rows: int = MAX_ROWS) -> Iterator[Table | Text]:
    """One table of what depends on the rank and one of recompiles, each only when there is something in it."""
    if verdict.taints:
        headings = ("depends on the rank", "line", "why", "values by rank", "what to do, or why it is allowed")
        yield _table("rank-dependent guards and constants", headings, [_taint_row(t) for t in verdict.taints], max_rows)
        yield from _hidden(len(verdict.taints) - max_rows)
    if verdict.recompiles:
        headings = ("recompiled by", "times", "ranks", "line", "what to do")
        yield _table("recompiles", headings, [_recompile_row(c) for c in verdict.recompiles], max_rows)
        yield from _hidden(len(verdict.recompiles) - max_rows)


def _table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]], max_rows: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows[:max_rows]:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table


def _hidden(number: int) -> Iterator[Text]:
    if number > 0:
        yield Text(f"and {number} more in verdict.json", style="dim")


def _taint_row(taint: Taint) -> tuple[str, ...]:
    values = [f"{ranks_text(g.ranks)}: {value_text(g.item)}" for g in taint.groups if g.item is not None]
    why = f"{taint.grade.value}: {taint.kind.value}"
    advice = f"allowed: {taint.reason}" if taint.reason else taint.suggestion
    return f"{taint.what} {taint.text}", _line(taint.line), why, "\n".join(values), advice


def _recompile_row(cause: RecompileCause) -> tuple[str, ...]:
    guard = f"{cause.kind}: {cause.guard}" + (f" ({cause.values})" if cause.values else "")
    phases = ", ".join(phase for phase in cause.phases if phase)
    times = f"{cause.count}" + (f" in {phases}" if phases else "")
    return guard, times, ranks_text(cause.ranks), _line(cause.line), cause.advice


def _line(line: UserLine | None) -> str:
    return "" if line is None else f"{line}\n{line.code.strip()}".rstrip()
