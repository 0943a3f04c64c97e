"""Rows -> summary tables and the JSON of results; pure."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from tests.faults.drawn.sweep import Row
from tests.faults.judge import Outcome, described
from tests.faults.names import Route

_COLUMNS = tuple(Outcome)


def line_of(row: Row) -> str:
    """One row as text, printed when its case ends."""
    case = row.case
    seconds, _ = row.times
    took = f"{seconds:.1f} s after" if seconds is not None else ""
    drawn = f"np={case.world_size} rank={case.rank} step={case.step} {case.backend}"
    head = f"{row.judged.outcome:12} {row.route:11} {case.name:50} {drawn:32} {row.wall_s:5.1f} s {took}"
    detail = described(row.judged)
    return f"{head}\n             {detail[:240]}" if detail and not row.judged.outcome.is_right else head


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per route, the number of cases by outcome, and the times."""
    found: dict[str, Any] = {}
    for route in Route:
        of_route = [row for row in rows if row.route == route]
        if of_route:
            found[route.value] = _route_summary(of_route)
    return found


def _route_summary(rows: Sequence[Row]) -> dict[str, Any]:
    outcomes = Counter(row.judged.outcome.value for row in rows)
    wrong: Counter[str] = Counter()
    for row in rows:
        if row.judged.outcome == Outcome.DETECTED:
            wrong.update(row.judged.wrong)
    seconds = [row.times[0] for row in rows if row.times[0] is not None]
    median_s = worst_s = None
    if seconds:
        median_s = round(statistics.median(seconds), 2)
        worst_s = round(max(seconds), 2)
    return {
        "cases": len(rows),
        "outcomes": dict(sorted(outcomes.items())),
        "wrong": dict(sorted(wrong.items())),
        "median_s": median_s,
        "worst_s": worst_s,
    }


def tables(rows: Sequence[Row]) -> str:
    """Tables per route and per operator, and the commands that run each wrong case again."""
    parts = [_route_table(rows), _operator_table(rows)]
    replays = [row.replay for row in rows if not row.judged.outcome.is_right]
    if replays:
        parts.append("\n".join(["run again:", *replays]))
    return "\n\n".join(parts)


def _route_table(rows: Sequence[Row]) -> str:
    lines = []
    for route, fields in summary(rows).items():
        counts = ", ".join(f"{number} {name}" for name, number in fields["outcomes"].items())
        wrong = ", ".join(f"{name} {number}" for name, number in fields["wrong"].items())
        times = (
            f"; median {fields['median_s']} s, worst {fields['worst_s']} s" if fields["median_s"] is not None else ""
        )
        lines.append(f"{route:12} {fields['cases']:4} cases: {counts}{f' (wrong: {wrong})' if wrong else ''}{times}")
    return "\n".join(lines)


def _operator_table(rows: Sequence[Row]) -> str:
    by_cell: dict[tuple[str, Route], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row.case.operator.name, row.route), []).append(row)
    lines = [_table_line("operator", list(Route))]
    for name in sorted({name for name, _ in by_cell}):
        cells = [_cell(by_cell.get((name, route), ())) for route in Route]
        lines.append(_table_line(name, cells))
    return "\n".join(lines)


def _table_line(name: str, cells: Sequence[str]) -> str:
    return f"{name:26} " + " ".join(f"{cell:>24}" for cell in cells)


def _cell(rows: Sequence[Row]) -> str:
    counts = Counter(row.judged.outcome for row in rows)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _COLUMNS if counts[outcome])


def results(rows: Sequence[Row], *, command: str) -> dict[str, Any]:
    """The file of results."""
    ordered = sorted(rows, key=lambda row: (row.case.name, row.route))
    return {
        "command": command,
        "machine": {
            "arch": platform.machine(),
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
        },
        "summary": summary(rows),
        "rows": [row.as_json() for row in ordered],
    }
