"""Rows -> the tables a person reads, and the file of results; pure."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from tpcompile.corpus.generated.judge import Outcome, described
from tpcompile.corpus.generated.names import Route
from tpcompile.corpus.generated.sweep import Row

_COLUMNS = tuple(Outcome)


def line_of(row: Row) -> str:
    """One row, as it comes."""
    case = row.case
    took = f"{row.evidence.seconds:.1f} s after" if row.evidence.seconds is not None else ""
    drawn = f"np={case.world_size} rank={case.rank} step={case.step} {case.backend}"
    head = f"{row.judged.outcome:12} {row.route:11} {case.name:50} {drawn:32} {row.wall_s:5.1f} s {took}"
    detail = described(row.judged)
    return f"{head}\n             {detail[:240]}" if detail and not row.judged.outcome.is_right else head


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per route: how many of each outcome, and the times."""
    found: dict[str, Any] = {}
    for route in Route:
        mine = [row for row in rows if row.route == route]
        if not mine:
            continue
        outcomes = Counter(row.judged.outcome.value for row in mine)
        wrong = Counter(item for row in mine if row.judged.outcome == Outcome.PARTLY for item in row.judged.wrong)
        seconds = [row.evidence.seconds for row in mine if row.evidence.seconds is not None]
        found[route.value] = {
            "cases": len(mine),
            "outcomes": dict(sorted(outcomes.items())),
            "wrong": dict(sorted(wrong.items())),
            "median_s": round(statistics.median(seconds), 2) if seconds else None,
            "worst_s": round(max(seconds), 2) if seconds else None,
        }
    return found


def tables(rows: Sequence[Row]) -> str:
    """Per route and per operator, then how to run again what is not right."""
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
    lines = [f"{'operator':26} " + " ".join(f"{route:>24}" for route in Route)]
    for name in sorted({row.case.operator.name for row in rows}):
        cells = [
            _cell([row for row in rows if row.case.operator.name == name and row.route == route]) for route in Route
        ]
        lines.append(f"{name:26} " + " ".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


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
