"""Rows of all runs -> a table for the terminal, and JSON for a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from tests.clients.clients import CLIENTS
from tests.clients.judge import Row

_HEADING = ("client", "fault", "route", "found", "rank", "cause", "line", "s", "the first finding")


def as_text(rows: Sequence[Row]) -> str:
    """One line for each run, in the form of a Markdown table."""
    lines = [_HEADING, tuple("---" for _ in _HEADING)]
    for row in rows:
        words = [_word(value) for value in (row.found, row.rank, row.cause, row.line)]
        lines.append((row.client, row.fault or "none", row.route, *words, f"{row.wall_s:.0f}", row.says))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _word(value: bool | None) -> str:
    if value is None:
        return ""
    return "yes" if value else "no"


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """Counts of both kinds of runs."""
    faulty = [row for row in rows if row.fault]
    healthy = [row for row in rows if not row.fault]
    return {
        "healthy": len(healthy),
        "alarms": sum(row.found for row in healthy),
        "faults": len(faulty),
        "found": sum(row.found for row in faulty),
        "rank right": sum(bool(row.found and row.rank) for row in faulty),
        "cause right": sum(bool(row.found and row.cause) for row in faulty),
        "line right": sum(bool(row.found and row.line) for row in faulty),
        "all right": sum(row.is_right for row in faulty),
    }


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows with the versions and the machine that they were measured with; other rows of the file stay."""
    names = sorted({"torch", *(client.needs for client in CLIENTS)})
    facts = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: metadata.version(name) for name in names},
    }
    kept = [row for row in read(path) if _key(row) not in {_key(new) for new in rows}]
    ordered = sorted([*kept, *rows], key=_key)
    found = {**facts, "summary": summary(ordered), "rows": [asdict(row) for row in ordered]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def read(path: Path) -> list[Row]:
    """Rows of earlier calls; none where there is no such file."""
    if not path.exists():
        return []
    return [Row(**fields) for fields in json.loads(path.read_text())["rows"]]


def _key(row: Row) -> tuple[int, str, str]:
    """What a run is known by: clients in their order, healthy runs first."""
    names = [client.name for client in CLIENTS]
    return names.index(row.client), row.fault, row.route
