"""`tpcompile run -- COMMAND`: a job, unedited and watched; its own output and exit code, a verdict last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpcompile.cli.outputs import Html, Json, Junit, Quiet
from tpcompile.errors import ConfigError, TpCompileError

if TYPE_CHECKING:
    from tpcompile.evidence.rundir import RunDir


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="What starts the job: torchrun, accelerate, srun, python -m ..."),
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for verdict and logs; default: runs/<utc time>-run-<id>.")
    ] = None,
    policy: Annotated[
        Literal["stop", "warn"], typer.Option(help="stop: a rank divergence ends the job. warn: it is reported only.")
    ] = "stop",
    follow: Annotated[
        list[str] | None,
        typer.Option("--follow", metavar="PACKAGE", help="An installed package to record the lines of; repeatable."),
    ] = None,
    flow: Annotated[
        bool | None,
        typer.Option("--flow/--no-flow", help="Record executed lines; default: where it costs less than 0.5 %."),
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
    junitxml: Junit = None,
    html: Html = None,
) -> None:
    """Run a distributed job without editing it; a verdict at the end names rank, cause and line.

    Example: tpcompile run -- torchrun --nproc-per-node 8 train.py

    The exit code is that of the job.
    """
    from tpcompile.cli import outputs
    from tpcompile.evidence.rundir import RunDir, new_name
    from tpcompile.report import console
    from tpcompile.watched import Settings, run_watched

    if outputs.is_stdout(json):
        raise ConfigError("--json needs a FILE here: stdout is that of the job")
    directory = RunDir.create_new(run_dir or Path(new_name("run")))
    settings = Settings(run_dir=str(directory.path.resolve()), policy=policy, follow=tuple(follow or ()), flow=flow)
    code = run_watched(command, settings, console.stderr(), is_quiet=quiet)
    try:
        verdict = directory.read_verdict()
        if verdict is not None:
            outputs.write(verdict, json=json, junitxml=junitxml)
        if html is not None:
            _write_page(directory, html)
    except TpCompileError as error:  # the exit code is that of the job
        print(f"tpcompile run: {error}", file=sys.stderr)
    raise typer.Exit(code)


def _write_page(directory: RunDir, html: Path) -> None:
    from tpcompile.cli import outputs
    from tpcompile.cli.compare import judge
    from tpcompile.report.page.gather import gathered

    try:
        with gathered(directory.path, judge) as evidence:
            outputs.write_page(evidence, html)
    except ConfigError as error:
        raise ConfigError(f"no page: {error}") from None
