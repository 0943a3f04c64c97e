"""Rows of all runs -> a table for the terminal, and JSON for a file.

`python -m tests.clients.table FILE` prints that part of docs/results.md from such a file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from tests.clients.clients import CLIENTS
from tests.clients.judge import Row
from tests.clients.watched import SENTINEL

_PAGE_HEADING = ("client", "fault in its own code", "found", "rank", "cause", "line")
_HEADING = ("client", "fault", "route", "found", "rank", "cause", "line", "s", "the first finding")


def as_text(rows: Sequence[Row]) -> str:
    """One line for each run, in the form of a Markdown table."""
    lines = [_HEADING, tuple("---" for _ in _HEADING)]
    for row in rows:
        words = [_word(value) for value in (row.found, row.rank, row.cause, row.line)]
        lines.append((row.client, row.fault or "none", row.route, *words, f"{row.wall_s:.0f}", row.says))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def as_page(rows: Sequence[Row]) -> str:
    """What docs/results.md shows: the counts, and for each fault what goes wrong and what of the verdict is right."""
    counts = summary(rows)
    rights = ", ".join(f"{name} {counts[name]}" for name in ("rank right", "cause right", "line right", "all right"))
    says = f"Healthy runs: {counts['healthy']}, stopped {counts['alarms']}. Faults: {counts['faults']}, found "
    lines = [_PAGE_HEADING, tuple("---" for _ in _PAGE_HEADING)]
    by_key = {_key(row): row for row in rows}
    for client in CLIENTS:
        for fault in client.faults:
            row = by_key.get((CLIENTS.index(client), fault.name, SENTINEL))
            if row is not None:
                words = [_word(value) for value in (row.found, row.rank, row.cause, row.line)]
                lines.append((client.name, fault.says, *words))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{says}{counts['found']}; {rights}:\n\n{table}"


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
    facts = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": _versions(),
    }
    kept = [row for row in read(path) if _key(row) not in {_key(new) for new in rows}]
    ordered = sorted([*kept, *rows], key=_key)
    found = {**facts, "summary": summary(ordered), "rows": [asdict(row) for row in ordered]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _versions() -> dict[str, str]:
    """Versions of the frameworks that are installed."""
    found = {}
    for name in sorted({"torch", *(client.needs for client in CLIENTS)}):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def read(path: Path) -> list[Row]:
    """Rows of earlier calls; none where there is no such file."""
    if not path.exists():
        return []
    return [Row(**fields) for fields in json.loads(path.read_text())["rows"]]


def _key(row: Row) -> tuple[int, str, str]:
    """What a run is known by: clients in their order, healthy runs first."""
    names = [client.name for client in CLIENTS]
    return names.index(row.client), row.fault, row.route


if __name__ == "__main__":
    print(as_page(read(Path(sys.argv[1]))))
