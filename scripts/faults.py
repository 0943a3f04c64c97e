#!/usr/bin/env python
"""Planted faults of rank divergence, and healthy programs: `list` what there is, `run` them for real.

scripts/faults.py list
scripts/faults.py run [NAME ...] [--jobs N] [--json FILE] [--columns tlparse,detail,spmd_check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.case import chosen, load
from tests.faults.columns import COLUMNS
from tests.faults.matrix import Matrix, listing, made_with, render, row_of
from tests.faults.sweep import sweep
from tpcompile import logs
from tpcompile.cli import ending
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.gate import faults
from tpcompile.report import console as consoles
from tpcompile.report.stdout import say

app = ending.new_app(
    name="scripts/faults.py",
    help="Planted faults of rank divergence, and healthy programs: list or run them.",
    no_args_is_help=True,
)


@app.command("list")
def list_() -> None:
    """List all cases: what is planted, which cause must be reported, and the public issues that it stands for."""
    every = load("planted", "healthy").values()
    listed: dict[str, list[tuple[str, ...]]] = {
        "Planted faults and programs that look like one, run by `scripts/faults.py run`": [
            row_of(case) for case in every if not case.is_drawn
        ],
        "Healthy programs, run by `scripts/faults.py run NAME` and drawn by scripts/clean_runs.py": [
            (case.name, case.what) for case in every if case.is_drawn
        ],
        "Faults of the block, injected by `tpcompile gate --fault NAME`": [
            (name, fault.what) for name, fault in faults.ALL.items()
        ],
    }
    console = consoles.stdout()
    for title, rows in listed.items():
        if console.is_terminal:
            console.print(f"{title}:", markup=False)
            console.print(listing(rows))
            continue
        for row in rows:  # one line per case with tabs, for grep and cut
            say("\t".join(cell.replace("\n", ", ") for cell in row))


@app.command("run")
def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of `scripts/faults.py list`; default: all planted ones.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases to run in parallel; their times get longer.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the matrix there as JSON.")] = None,
    columns: Annotated[
        str, typer.Option("--columns", metavar="TOOL,...", help="Tools to compare with: tlparse, detail, spmd_check.")
    ] = "",
    device: Annotated[Literal["auto", "cpu"], typer.Option(help="auto: GPUs where there are two, else CPU.")] = "auto",
    run_dir: Annotated[
        Path | None, typer.Option(help="Keep logs and verdicts in this folder; default: not kept.")
    ] = None,
) -> None:
    """Run cases for real; exit 0 only when every fault is named and no healthy program is red."""
    logs.setup(rank=0)
    cases = chosen(names or ())
    tools = [tool for tool in columns.split(",") if tool]
    unknown = [tool for tool in tools if tool not in COLUMNS]
    if unknown:
        raise ConfigError(f"unknown column {', '.join(unknown)}; choose from {', '.join(COLUMNS)}")
    if tools and any(case.is_drawn for case in cases):
        raise ConfigError("--columns: healthy programs with drawn parameters run with the sentinel only")
    console = Console()

    def report(text: str) -> None:
        console.print(text, markup=False)

    results = sweep(cases, run_dir, jobs=jobs, tools=tools, device=device, progress=report)
    matrix = Matrix(results=tuple(results), made_with=made_with(["scripts/faults.py", *sys.argv[1:]]))
    if json is not None:
        json.write_text(matrix.to_json(indent=1))
    render(matrix, console)
    raise typer.Exit(ExitCode.PASS if matrix.is_right else ExitCode.FAIL)


if __name__ == "__main__":
    ending.run(app, "scripts/faults.py")
