"""Verdict + run directory -> every report: terminal, junit.xml, GitHub."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from tpcompile.errors import PreflightError
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import console as consoles
from tpcompile.report import github, junit, show
from tpcompile.report.stdout import forgiving


def publish(
    verdict: Verdict,
    run_dir: RunDir,
    console: Console,
    environ: Mapping[str, str],
    *,
    command: str = "gate",
    amount: show.Amount = "all",
) -> None:
    """Write junit.xml, print the verdict to `console`, and in GitHub Actions add the step summary and annotations.

    `command` is the subcommand of tpcompile, for the title. A report that cannot be written costs one line of output
    and does not change the verdict. With `amount="json"` only the verdict goes to `console`, the rest to stderr.
    """
    show.show(verdict, console, run=run_dir.path, command=command, amount=amount)
    write(verdict, run_dir, consoles.stderr() if amount == "json" else console, environ)


def write(verdict: Verdict, run_dir: RunDir, console: Console, environ: Mapping[str, str]) -> None:
    """The reports of `publish` that are files and annotations."""
    try:
        run_dir.write_text(run_dir.junit.name, junit.render(verdict))
    except PreflightError as error:
        console.print(f"no {run_dir.junit.name}: {error}", markup=False, soft_wrap=True)
    with forgiving():
        for line in github.write(verdict, environ):
            console.file.write(f"{line}\n")  # as it is: a workflow command must not be wrapped or styled
        console.file.flush()
