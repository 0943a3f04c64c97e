"""`python -m tpcompile.dryrun TARGET`: the body of `tpcompile dryrun`, in a process that may import torch."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import typer

from tpcompile import logs
from tpcompile.cli import ending, outputs
from tpcompile.cli.outputs import Html, Json, Junit, Quiet
from tpcompile.dryrun import arch as gpu
from tpcompile.dryrun.alike import trace_ranks
from tpcompile.dryrun.branch import with_executed_lines
from tpcompile.dryrun.forks import Forks
from tpcompile.dryrun.judge import Judge
from tpcompile.dryrun.plan import Plan, axes_of, ranks_of
from tpcompile.errors import ExitCode, TpCompileError
from tpcompile.evidence.judgement.verdict import DRYRUN
from tpcompile.evidence.rundir import RunDir, new_name
from tpcompile.report import console, show
from tpcompile.report.publish import publish
from tpcompile.target import import_target

app = ending.new_app()


@app.command()
def dryrun(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="MODULE:FUNCTION, as for `tpcompile gate`.")],
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks of the job; none is started.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="AXIS=SIZE,...", help="Mesh, outermost first: dp=64,tp=16."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", help="Trace N ranks only, whole groups; without a difference exit with 6."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="What these ranks are drawn with.")] = 0,
    lower: Annotated[
        bool, typer.Option("--lower-all", help="AOTAutograd on all ranks, not on the first group.")
    ] = False,
    arch: Annotated[
        str, typer.Option("--arch", help="sm_90 or sm_80: generate code for such a GPU, and compare its kernels.")
    ] = "",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For `build`.")] = None,
    num_breaks: Annotated[int, typer.Option("--num-breaks", min=0, help="Graph breaks that are meant.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Ranks at a time; default: one for each core.")] = None,
    limit_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="Seconds for one rank.")] = 600.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for verdict and records; default: runs/<utc time>-dryrun-<id>.")
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
    junitxml: Junit = None,
    html: Html = None,
) -> None:
    """Trace each rank of a job that is not started, without a GPU, and compare what they compile.

    Example: tpcompile dryrun my_model:build --mesh dp=64,tp=16

    Each rank is a process on fake ranks with its tensors on meta. Exits as the gate does: with 1 for a difference, with
    5 where nothing was compiled, and with 6 where no difference was found among some of the ranks. Ctrl-C judges the
    ranks that were traced.
    """
    logs.setup(rank=0)
    axes = axes_of(world_size, mesh)
    traced = ranks_of(axes, count=ranks, seed=seed)
    if arch != gpu.seen:
        gpu.become(arch)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked rank cannot use the driver, and no rank needs a GPU
    plan = Plan(
        target=target, settings=tuple(settings or ()), axes=axes, ranks=traced, seed=seed, lowers_all=lower, arch=arch
    )  # fmt: skip
    import_target(target, plan.settings)
    directory = RunDir.create_new(run_dir or Path(new_name("dryrun")))
    judge = Judge(plan, directory, limit_s=limit_s, num_breaks=num_breaks)
    forks = Forks(plan=plan, run_dir=directory, jobs=jobs or len(os.sched_getaffinity(0)), limit_s=limit_s)
    try:
        with _interrupted_by_sigterm():
            for ended in trace_ranks(forks):
                judge.take(ended)
    except KeyboardInterrupt as stopped:  # what was traced until now is judged
        judge.stopped_with = ExitCode(*stopped.args or (ExitCode.INTERRUPTED,))
    verdict = judge.verdict()
    if judge.stopped_with is None:
        # The verdict is known without: a full disk, or Ctrl-C, leaves it as it is.
        with suppress(KeyboardInterrupt, OSError, TpCompileError), _interrupted_by_sigterm():
            verdict = with_executed_lines(verdict, forks)
    directory.write_run(_facts(arch) | judge.judged_by())
    directory.write_verdict(verdict)
    amount = show.amount(quiet=quiet, json=outputs.is_stdout(json))
    publish(verdict, directory, console.stdout(), os.environ, command="dryrun", amount=amount)
    outputs.write(verdict, json=json, junitxml=junitxml)
    if html is not None:
        from tpcompile.report.page.of_run import evidence_of_run

        outputs.write_page(evidence_of_run(directory, verdict), html)
    raise typer.Exit(judge.stopped_with or verdict.exit_code)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the ranks as Ctrl-C does."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(ExitCode.TERMINATED)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _facts(arch: str) -> dict[str, object]:
    return {
        "kind": DRYRUN,
        "command": " ".join(sys.argv),
        "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "host": platform.node(),
        "device": arch or "meta",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    ending.run_and_leave(app, "tpcompile dryrun")
