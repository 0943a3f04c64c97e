"""Taints and recompiles of a verdict -> rich tables below its checks."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from tpcompile.evidence.judgement.rank_taint import value_text
from tpcompile.evidence.records import Taint, UserLine, Verdict, items_of
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.report.wording import plain, taints_by_line

MAX_ROWS = 5
"""Rows shown per table; the others are only counted, verdict.json holds all of them."""
Row = tuple[str, ...]
_TAINT_HEADINGS = ("depends on the rank", "line", "why", "values by rank", "what to do, or why it is allowed")
_RECOMPILE_HEADINGS = ("recompiled by", "times", "ranks", "line", "what to do")


def tables(verdict: Verdict, *, max_rows: int = MAX_ROWS) -> Iterator[Table | Text]:
    """One table of rank-dependent values and one of recompiles, each only when it has rows."""
    recompiles: list[Row] = []
    for cause in verdict.recompiles:
        phases = ", ".join(phase for phase in cause.phases if phase)
        times = f"{cause.count}" + (f" in {phases}" if phases else "")
        recompiles.append((cause.text, times, ranks_text(cause.ranks), _line(cause.line), cause.advice))
    found = {
        "rank-dependent guards and constants": (
            _TAINT_HEADINGS,
            [_taint_row(*alike) for alike in taints_by_line(verdict)],
        ),
        "recompiles": (_RECOMPILE_HEADINGS, recompiles),
    }
    for title, (headings, rows) in found.items():
        if not rows:
            continue
        table = empty_table(title, headings)
        for row in rows[:max_rows]:
            add_row(table, row)
        yield table
        num_hidden = len(rows) - max_rows
        if num_hidden > 0:
            yield Text(f"and {num_hidden} more in verdict.json", style="dim")


def empty_table(title: str, headings: Row) -> Table:
    """A table without rows, whose cells are folded and never cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def add_row(table: Table, cells: Row, *styled: Text) -> None:
    """Add a row: cells of plain text, then cells with a style."""
    table.add_row(*(Text(plain(cell)) for cell in cells), *styled)


def _taint_row(taint: Taint, num_more: int) -> Row:
    values = [f"{ranks_text(ranks)}: {value_text(item)}" for ranks, item in items_of(taint.groups)]
    why = f"{taint.grade.value}: {taint.kind.value}"
    more = f"\nand {num_more} more in that line" if num_more else ""
    return f"{taint.what} {taint.text}{more}", _line(taint.line), why, "\n".join(values), taint.advice


def _line(line: UserLine | None) -> str:
    return "" if line is None else f"{line}\n{line.code.strip()}".rstrip()
