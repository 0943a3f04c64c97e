"""`python -m tpcompile.bench ARGUMENTS`: the body of `tpcompile bench`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from tpcompile import config, launch
from tpcompile.bench import baseline
from tpcompile.bench.names import DEFAULT, Name
from tpcompile.bench.processes import RankLost
from tpcompile.bench.ratios import failures
from tpcompile.bench.records import Report
from tpcompile.bench.run import Plan, measured_presets
from tpcompile.bench.table import lines
from tpcompile.cli import ending, outputs
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.records.base import Frozen
from tpcompile.evidence.rundir import new_name
from tpcompile.report import console
from tpcompile.request import DEFAULT_PRESETS

app = ending.new_app()


@app.command()
def bench(
    presets: Annotated[
        list[str] | None, typer.Option("--preset", help="Repeatable. Default: wan14b on GPUs, else cpu_smoke.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks, each with its own GPU where there are GPUs.")] = 2,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of the stack, instead of the preset's.")] = None,
    train: Annotated[bool, typer.Option(help="Forward and backward instead of forward.")] = False,
    programs: Annotated[
        list[str] | None,
        typer.Option(
            "--program",
            help="BASE[:VARIANT...], such as C:graphed, or your own FILE:FUNCTION[:VARIANT...]. Repeatable. Default: "
            "all forms of the block that ships.",
        ),
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="A program to leave out. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all programs take turns.")] = 10,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the preset.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs where there are any.")] = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Programs that are compiled at the same time. Default: cores / ranks.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="For each answer of a rank.")] = 300.0,
    keep_going: Annotated[
        bool, typer.Option(help="A program with a rank that died or hung becomes a row, and does not end the run.")
    ] = False,
    logs: Annotated[
        Path | None, typer.Option(help="Folder of the ranks' output; default: runs/<utc time>-bench-<id>.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all rounds.")] = None,
    baseline_file: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="Fail where ours take more regions, kernels or launches."),
    ] = None,
    fail_on_times: Annotated[
        bool, typer.Option(help="With --baseline: times fail, which otherwise only warn.")
    ] = False,
    write_baseline: Annotated[
        Path | None, typer.Option("--write-baseline", metavar="FILE", help="Make this run the baseline, if it passes.")
    ] = None,
) -> None:
    """Time eager, modes A, B and C, their profiles, and your own tensor-parallel programs in one run.

    Exits with 1 where outputs are not those of a single device, or where one of ours enters more than one compiled
    region; with 124 when a rank does not answer in time.
    """
    # Files that cannot be read or written are refused before minutes are measured.
    if outputs.is_stdout(json_file):
        raise ConfigError("--json needs a FILE here: stdout has the table")
    for path in filter(None, (json_file, write_baseline)):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it")
    committed = None if baseline_file is None else baseline.read(baseline_file)
    before = baseline.Baseline()
    if write_baseline is not None and write_baseline.exists():
        before = baseline.read(write_baseline)
    num_gpus = 0 if device == "cpu" else launch.count_gpus()
    place = launch.chosen_device(device, nproc, num_gpus, otherwise="cpu")
    overrides = [*(settings or []), *([f"block.num_layers={layers}"] if layers else [])]
    default = DEFAULT_PRESETS["cpu" if place == "cpu" else "cuda"]
    resolved = [config.load(preset, overrides, train=train, device=place) for preset in presets or [default]]
    names = _names(programs or (DEFAULT if committed is None else committed.programs), without or [])
    for one in resolved:
        one.check_tp(nproc)
        launch.check_size(one, asked=device)
    cores_per_rank = max(1, launch.num_cores() // nproc)
    plan = Plan(
        settings=resolved,
        names=names,
        world_size=nproc,
        rounds=rounds,
        jobs=jobs or cores_per_rank,
        cores_per_rank=cores_per_rank,
        timeout_s=timeout_s,
        keeps_going=keep_going,
        logs=logs or Path(new_name("bench")),
    )
    _set_environ(plan)
    plan.logs.mkdir(parents=True, exist_ok=True)
    report, lost = _run(plan, json_file)
    if lost is not None:
        print(f"error: {lost}", file=sys.stderr)
        raise typer.Exit(ExitCode.TIMEOUT if lost.timed_out else ExitCode.FAIL)
    has_failed = any(failures(one) for one in report.measured)
    if committed is not None:
        has_failed |= _has_regressed(report, committed, fail_on_times=fail_on_times)
    if write_baseline is not None and not has_failed:
        _write(write_baseline, baseline.written(before, report))
    raise typer.Exit(has_failed)


def _names(programs: Sequence[str], without: Sequence[str]) -> list[Name]:
    """The programs without those left out. Raises ConfigError for a name that is unknown, and where none is left."""
    named = {text: Name.of(text) for text in programs}
    for text in without:
        if text not in named:
            raise ConfigError(f"--without {text}: no such program would run")
    left = [name for text, name in named.items() if text not in without]
    if not left:
        raise ConfigError("--without leaves no program")
    return left


def _set_environ(plan: Plan) -> None:
    """Share the cores between the processes that compile at the same time, in the environment that they inherit."""
    threads = str(max(1, launch.num_cores() // (plan.jobs * plan.world_size)))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
    os.environ.update(launch.NO_MULTICAST)
    if not plan.is_gpu and any(one.compile.backend == "inductor" for one in plan.settings):
        os.environ["CXX"] = launch.cxx_compiler()


def _run(plan: Plan, json_file: Path | None) -> tuple[Report, RankLost | None]:
    """Print and write the report after each preset; returns it with the rank that ended it early."""

    def say(text: str) -> None:
        console.stderr().print(text, style="dim", soft_wrap=True)

    say(f"output of the ranks: {plan.logs}")
    report = Report(
        command=shlex.join(["tpcompile", "bench", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=plan.world_size,
        rounds=plan.rounds,
        machine=None,
        measured=(),
    )
    _write(json_file, report)
    try:
        for measured, machine in measured_presets(plan, say):
            report = report.model_copy(update={"machine": machine, "measured": (*report.measured, measured)})
            _write(json_file, report)
            for line in lines(measured, machine, world_size=plan.world_size):
                console.stdout().print(line, soft_wrap=True)
    except RankLost as lost:
        return report, lost
    return report, None


def _write(path: Path | None, record: Frozen) -> None:
    if path is not None:
        path.write_text(record.to_json(indent=1) + "\n")


def _has_regressed(report: Report, committed: baseline.Baseline, *, fail_on_times: bool) -> bool:
    """Print what exceeds the baseline; True when something fails rather than warns."""
    has_failed = False
    for measured in report.measured:
        for found in baseline.regressions(committed, measured, report):
            is_failure = fail_on_times or not found.is_time
            has_failed |= is_failure
            mark, style = ("FAIL", "red") if is_failure else ("WARN", "yellow")
            text = f"{mark} {measured.preset} {found.program}: {found.change}: {found.says}"
            console.stdout().print(text, style=style, soft_wrap=True)
    return has_failed


if __name__ == "__main__":
    ending.run(app, "tpcompile bench")
