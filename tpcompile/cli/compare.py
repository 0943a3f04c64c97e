"""`tpcompile compare RUN`: the comparison again, offline, from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    run: Annotated[Path, typer.Argument(help="Run directory of `tpcompile gate`, or of a sentinel.")],
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the outcome only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, and nothing else.")] = False,
) -> None:
    """Compare the ranks of a finished run again, without torch and without GPUs."""
    from tpcompile.evidence.rundir import RunDir
    from tpcompile.gate.replay import replay
    from tpcompile.report import console, show

    directory = RunDir.open(run)
    verdict = replay(directory)
    kind = str(directory.read_run().get("kind", "gate"))
    show.show(verdict, console.stdout(), run=run, command=kind, amount=show.amount(quiet=quiet, json=as_json))
    raise typer.Exit(verdict.exit_code)
