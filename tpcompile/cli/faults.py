"""`tpcompile faults list` and `tpcompile faults run`: the corpus of planted faults and its detection matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Planted faults of rank divergence: the cases of the corpus, and whether each is named.")


@app.command("list")
def list_() -> None:
    """List the cases: what is planted, what must be reported, which public threads it stands for."""
    from rich.console import Console

    from tpcompile.corpus.cases import ALL
    from tpcompile.corpus.matrix import listing

    Console().print(listing(list(ALL.values())))


@app.command("run")
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Cases, see `tpcompile faults list`; default: all.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases to run in parallel; their times get longer.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the matrix as JSON to this file.")] = None,
    columns: Annotated[
        str, typer.Option(metavar="TOOL,...", help="Tools to compare with: tlparse, detail, spmd_check.")
    ] = "",
    device: Annotated[Literal["auto", "cpu"], typer.Option(help="auto: GPUs where there are two, else CPU.")] = "auto",
    run_dir: Annotated[
        Path | None, typer.Option(help="Keep logs and verdicts in this folder; default: not kept.")
    ] = None,
) -> None:
    """Run cases for real; exit 0 only when every fault is named and no healthy program is red."""
    from rich.console import Console

    from tpcompile import logs
    from tpcompile.corpus.cases import chosen
    from tpcompile.corpus.columns import COLUMNS
    from tpcompile.corpus.matrix import Matrix, made_with, render
    from tpcompile.corpus.sweep import sweep
    from tpcompile.errors import ConfigError, ExitCode

    logs.setup(rank=0)
    cases = chosen(names or ())
    tools = [tool for tool in columns.split(",") if tool]
    unknown = [tool for tool in tools if tool not in COLUMNS]
    if unknown:
        raise ConfigError(f"unknown column {', '.join(unknown)}; choose from {', '.join(COLUMNS)}")
    console = Console()

    def tell(text: str) -> None:
        console.print(text, markup=False)

    results = sweep(cases, run_dir, jobs=jobs, tools=tools, device=device, progress=tell)
    matrix = Matrix(results=tuple(results), made_with=made_with())
    if json is not None:
        json.write_text(matrix.to_json(indent=1))
    render(matrix, console)
    raise typer.Exit(ExitCode.PASS if matrix.is_right else ExitCode.FAIL)
