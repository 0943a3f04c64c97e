"""Results -> the detection matrix as a record and as tables."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence
from importlib import metadata

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.faults.case import Planted
from tests.faults.judge import Outcome, Result
from tpcompile.evidence.records import SCHEMA_VERSION, Frozen
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.report.wording import plain

_STYLES = {Outcome.NAMED: "green", Outcome.GREEN: "green", Outcome.DETECTED: "yellow"}


class Matrix(Frozen):
    """All results of one invocation."""

    schema_version: int = SCHEMA_VERSION
    made_with: dict[str, str] = {}
    """Command, machine and versions."""
    results: tuple[Result, ...]

    @property
    def is_right(self) -> bool:
        """True when every fault was named and every healthy program stayed green."""
        return bool(self.results) and all(result.outcome.is_right for result in self.results)

    @property
    def seconds(self) -> list[float]:
        """Seconds from fault to verdict, of the cases that have one."""
        return [result.seconds for result in self.results if result.seconds is not None and result.expected]


def made_with(command: Sequence[str]) -> dict[str, str]:
    """Command, machine and versions of this process."""
    listed = ""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    gpus = Counter(line.partition(": ")[2].partition(" (")[0] for line in listed.splitlines())
    machine = [f"{platform.machine()}, {os.cpu_count()} cores", *(f"{n} {name}" for name, n in gpus.items())]
    return {
        "command": " ".join(command),
        "machine": ", ".join(machine),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def render(matrix: Matrix, console: Console) -> None:
    """Print the matrix, the wrong results, and a summary line."""
    console.print(_table(matrix.results))
    for result in matrix.results:
        if result.why:
            console.print(Text(f"{result.name}: {result.outcome.value}: {plain(result.why)}", overflow="fold"))
    console.print(Text(summary(matrix), style="bold green" if matrix.is_right else "bold red"))


def summary(matrix: Matrix) -> str:
    """Counts by outcome, and the times."""
    counts = Counter(result.outcome for result in matrix.results)
    text = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    if not matrix.seconds:
        return text
    median, worst = statistics.median(matrix.seconds), max(matrix.seconds)
    return f"{text}; fault to verdict: median {median:.2f} s, worst {worst:.2f} s"


def listing(rows: Sequence[Sequence[str]]) -> Table:
    """What can be run: rows of name, what it is, and for planted ones what must be reported, public threads."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for heading in ("what", "must be reported", "public threads")[: len(rows[0]) - 1]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def row_of(case: Planted) -> tuple[str, str, str, str]:
    """The row of a case in a listing."""
    expected = f"{case.cause.value} ({named_ranks(case.blamed)})" if case.cause else "nothing"
    return case.name, case.what, expected, "\n".join(case.threads)


def _table(results: Sequence[Result]) -> Table:
    tools = sorted({tool for result in results for tool in result.columns})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("cause", overflow="fold")
    table.add_column("line", overflow="fold")
    for tool in tools:
        table.add_column(tool)
    for result in results:
        outcome = Text(result.outcome.value, style=_STYLES.get(result.outcome, "bold red"))
        of_tools = [result.columns.get(tool, "") for tool in tools]
        cells = [Text(plain(cell)) for cell in (*_cells(result), *of_tools)]
        table.add_row(Text(result.name), outcome, *cells)
    return table


def _cells(result: Result) -> tuple[str, str, str]:
    """Seconds, cause and line of a result."""
    seconds = "" if result.seconds is None else f"{result.seconds:.2f}"
    found = result.found
    if found is None:
        return seconds, "", ""
    line = f"{found.line.file.rpartition('/')[2]}:{found.line.line}" if found.line else ""
    return seconds, found.cause.value, line
