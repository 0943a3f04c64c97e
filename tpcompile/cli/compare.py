"""`tpcompile compare RUN`: the comparison again, offline, from the records of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpcompile.cli.outputs import Html, Json, Junit, Quiet

if TYPE_CHECKING:
    from tpcompile.evidence.records import Verdict
    from tpcompile.evidence.rundir import RunDir


def judge(directory: RunDir, beside: Sequence[RunDir] = ()) -> Verdict:
    """The verdict of a run, from the records of its ranks, as `replay`. Raises ConfigError when there are none."""
    from tpcompile.gate.replay import replay

    return replay(directory, beside)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directory of `tpcompile gate`, of a check, or of a sentinel; of a run on several nodes, all.",
        ),
    ],
    quiet: Quiet = False,
    json: Json = None,
    junitxml: Junit = None,
    html: Html = None,
) -> None:
    """Compare the ranks of a finished run again, without torch and without GPUs.

    Example: tpcompile compare runs/20261128T092011-gate-d64a
    """
    from tpcompile.cli import outputs
    from tpcompile.evidence.rundir import RunDir
    from tpcompile.report import console, show

    run = runs[0]
    directory, *beside = map(RunDir.open, runs)
    verdict = judge(directory, beside)
    kind = str(directory.read_run().get("kind", "gate"))
    outputs.write(verdict, json=json, junitxml=junitxml)
    if html is not None:
        from tpcompile.report.page.of_run import evidence_of_run

        outputs.write_page(evidence_of_run(directory, verdict), html)
    amount = show.amount(quiet=quiet, json=outputs.is_stdout(json))
    show.show(verdict, console.stdout(), run=run, command=kind, amount=amount)
    raise typer.Exit(verdict.exit_code)
