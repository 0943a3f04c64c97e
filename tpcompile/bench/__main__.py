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
from tpcompile.choices import Device
from tpcompile.cli import ending
from tpcompile.errors import ConfigError, ExitCode, PreflightError
from tpcompile.evidence.rundir import new_name
from tpcompile.report import console
from tpcompile.request import DEFAULT_PRESETS

app = ending.new_app()
_ALWAYS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast stays off, for all programs alike."""


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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
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
    _check_folders(json_file, write_baseline)
    committed = None if baseline_file is None else baseline.read(baseline_file)
    before = baseline.Baseline()
    if write_baseline is not None and write_baseline.exists():
        before = baseline.read(write_baseline)
    os.environ.update(_ALWAYS)
    place = _place(device, nproc)
    cores_per_rank = max(1, launch.num_cores() // nproc)
    plan = Plan(
        settings=[
            _resolved(preset, layers, train, settings or [], place) for preset in presets or [DEFAULT_PRESETS[place]]
        ],
        names=_names(programs or (DEFAULT if committed is None else committed.programs), without or []),
        world_size=nproc,
        rounds=rounds,
        jobs=jobs or cores_per_rank,
        cores_per_rank=cores_per_rank,
        timeout_s=timeout_s,
        keeps_going=keep_going,
        logs=logs or Path(new_name("bench")),
    )
    _check_sizes(plan, is_asked=device != "auto")
    _set_threads(plan)
    plan.logs.mkdir(parents=True, exist_ok=True)
    report, lost = _run(plan, json_file)
    if lost is not None:
        print(f"error: {lost}", file=sys.stderr)
        raise typer.Exit(ExitCode.TIMEOUT if lost.timed_out else ExitCode.FAIL)
    has_failed = any(failures(one) for one in report.measured)
    if committed is not None:
        has_failed |= _has_regressed(report, committed, fail_on_times=fail_on_times)
    if not has_failed and write_baseline is not None:
        _write(baseline.written(before, report), write_baseline)
    raise typer.Exit(has_failed)


def _check_folders(*paths: Path | None) -> None:
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it")


def _place(asked: str, nproc: int) -> Literal["cpu", "cuda"]:
    """`cuda` or `cpu`. Raises PreflightError for more ranks than GPUs."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {asked}: choose auto, cpu or cuda")
    num_gpus = 0 if asked == "cpu" else launch.count_gpus()
    if num_gpus == 0 and asked != "cuda":
        return "cpu"
    if num_gpus == 0:
        raise PreflightError("--device cuda: no GPU here (nvidia-smi -L, CUDA_VISIBLE_DEVICES); use --device cpu")
    if num_gpus < nproc:
        raise PreflightError(f"{nproc} ranks but {num_gpus} GPUs; use --nproc {num_gpus} or --device cpu")
    return "cuda"


def _resolved(preset: str, layers: int | None, train: bool, settings: list[str], place: Device) -> config.RunConfig:
    overrides = [*settings, *([f"block.num_layers={layers}"] if layers else [])]
    return config.load(preset, overrides, train=train, device=place)


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


def _check_sizes(plan: Plan, *, is_asked: bool) -> None:
    """Raises ConfigError for a preset that the ranks do not divide, PreflightError for one sized for GPUs on a CPU."""
    may_be_large = plan.is_gpu or is_asked
    for one in plan.settings:
        one.check_tp(plan.world_size)
        if one.block.dim >= launch.GPU_DIM and not may_be_large:
            size = f"preset {one.preset} (dim {one.block.dim}) is sized for GPUs, and there is no GPU here"
            raise PreflightError(f"{size}; use --preset cpu_smoke, or --device cpu for a long run")


def _set_threads(plan: Plan) -> None:
    """Share the cores between the processes that compile at the same time, in the environment that they inherit."""
    threads = str(max(1, launch.num_cores() // (plan.jobs * plan.world_size)))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
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
    _write(report, json_file)
    try:
        for measured, machine in measured_presets(plan, say):
            report = report.model_copy(update={"machine": machine, "measured": (*report.measured, measured)})
            _write(report, json_file)
            for line in lines(measured, machine, world_size=plan.world_size):
                console.stdout().print(line, soft_wrap=True)
    except RankLost as lost:
        return report, lost
    return report, None


def _write(report: Report | baseline.Baseline, path: Path | None) -> None:
    if path is not None:
        path.write_text(report.to_json(indent=1) + "\n")


def _has_regressed(report: Report, committed: baseline.Baseline, *, fail_on_times: bool) -> bool:
    """Print what exceeds the baseline; True when something fails rather than warns."""
    has_failed = False
    for measured in report.measured:
        for found in baseline.regressions(baseline.case_of(committed, measured, report), measured):
            is_failure = fail_on_times or not found.is_time
            has_failed |= is_failure
            style = "red" if is_failure else "yellow"
            mark = "FAIL" if is_failure else "WARN"
            console.stdout().print(f"{mark} {measured.preset} {found.text}", style=style, soft_wrap=True)
    return has_failed


if __name__ == "__main__":
    ending.run(app, "tpcompile bench")
