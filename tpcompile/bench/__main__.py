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

from scripts.bench_peers import plot
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
    nproc: Annotated[int, typer.Option(min=1, help="Ranks, each with a GPU of its own where there are GPUs.")] = 2,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of the stack, instead of the preset's.")] = None,
    train: Annotated[bool, typer.Option(help="Forward and backward instead of forward.")] = False,
    programs: Annotated[
        list[str] | None,
        typer.Option(
            "--program",
            help="BASE[:VARIANT...], such as C:graphed, or your own package.module:function. Repeatable. Default: all.",
        ),
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="A program to leave out. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="In which all programs take turns.")] = 10,
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
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write an .svg or .png; needs the extra `plot`.")
    ] = None,
) -> None:
    """Time eager, modes A, B and C, their profiles, and other tensor-parallel programs on the same weights.

    Exits with 1 where outputs are not those of a single device, or where one of ours enters more than one compiled
    region; with 124 when a rank does not answer in time.
    """
    if plot_file is not None:
        plot.check(plot_file)
    # Files that cannot be read or written are refused before minutes are measured.
    _check_folders(json_file, plot_file, write_baseline)
    committed = None if baseline_file is None else baseline.read(baseline_file)
    is_new = write_baseline is not None and not write_baseline.exists()
    before = baseline.Baseline() if write_baseline is None or is_new else baseline.read(write_baseline)
    if not programs:
        programs = list(DEFAULT) if committed is None else committed.programs
    os.environ.update(_ALWAYS)
    place = _place(device, nproc)
    presets = presets or [DEFAULT_PRESETS[place]]
    found = [_resolved(preset, layers, train, settings or [], place) for preset in presets]
    for one in found:
        one.check_tp(nproc)
        if place == "cpu" and device == "auto" and one.block.dim >= launch.GPU_DIM:
            size = f"preset {one.preset} (dim {one.block.dim}) is sized for GPUs, and there is no GPU here"
            raise PreflightError(f"{size}; use --preset cpu_smoke, or --device cpu for a long run")
    num_jobs = jobs or max(1, launch.num_cores() // nproc)
    _set_threads(place, found, num_jobs * nproc)
    plan = Plan(
        settings=found,
        names=_names(programs, without or []),
        world_size=nproc,
        rounds=rounds,
        jobs=num_jobs,
        cores_per_rank=max(1, launch.num_cores() // nproc),
        timeout_s=timeout_s,
        keeps_going=keep_going,
        logs=_folder(logs),
    )
    report, lost = _run(plan, json_file)
    if plot_file is not None and report.measured:
        plot.write(report, plot_file)
    if lost is not None:
        print(f"error: {lost}", file=sys.stderr)
        raise typer.Exit(ExitCode.TIMEOUT if lost.timed_out else ExitCode.FAIL)
    has_failed = any([failures(one) for one in report.measured])
    if committed is not None:
        has_failed |= _has_regressed(report, committed, fail_on_times=fail_on_times)
    if write_baseline is not None and not has_failed:
        write_baseline.write_text(baseline.written(before, report).to_json(indent=1) + "\n")
    raise typer.Exit(has_failed)


def _has_regressed(report: Report, committed: baseline.Baseline, *, fail_on_times: bool) -> bool:
    """Whether something fails; what only warns is printed as well."""
    has_failed = False
    for measured in report.measured:
        for found in baseline.regressions(baseline.case_of(committed, measured, report), measured):
            is_failure = fail_on_times or not found.is_time
            has_failed |= is_failure
            style = "red" if is_failure else "yellow"
            mark = "FAIL" if is_failure else "WARN"
            console.stdout().print(f"{mark} {measured.preset} {found.text}", style=style, soft_wrap=True)
    return has_failed


def _check_folders(*paths: Path | None) -> None:
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it")


def _run(plan: Plan, json_file: Path | None) -> tuple[Report, RankLost | None]:
    """The report, printed and written after each preset, and the rank that ended it early."""
    out, progress = console.stdout(), console.stderr()
    progress.print(f"output of the ranks: {plan.logs}", style="dim", soft_wrap=True)
    report = Report(
        command=shlex.join(["tpcompile", "bench", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=plan.world_size,
        rounds=plan.rounds,
        machine=None,
        measured=(),
    )
    for step in measured_presets(plan, lambda text: progress.print(text, style="dim", soft_wrap=True)):
        measured = (*report.measured, step.measured) if step.measured is not None else report.measured
        report = report.model_copy(update={"machine": step.machine or report.machine, "measured": measured})
        if json_file is not None:
            json_file.write_text(report.to_json(indent=1) + "\n")
        if step.measured is not None and step.machine is not None:
            for line in lines(step.measured, step.machine, world_size=plan.world_size):
                out.print(line, soft_wrap=True)
        if step.lost is not None:
            return report, step.lost
    return report, None


def _resolved(preset: str, layers: int | None, train: bool, settings: list[str], place: Device) -> config.RunConfig:
    overrides = [*settings, *([f"block.num_layers={layers}"] if layers else [])]
    return config.load(preset, overrides, train=train, device=place)


def _names(programs: Sequence[str], without: Sequence[str]) -> list[Name]:
    names = [Name.of(text) for text in dict.fromkeys(programs)]
    left_out = {Name.of(text).text for text in without}
    if unknown := sorted(left_out - {name.text for name in names}):
        raise ConfigError(f"--without {unknown[0]}: no such program would run")
    found = [name for name in names if name.text not in left_out]
    if not found:
        raise ConfigError("--without leaves no program")
    return found


def _place(asked: str, nproc: int) -> Literal["cpu", "cuda"]:
    """`cuda` or `cpu`. Raises PreflightError for more ranks than GPUs."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {asked}: choose auto, cpu or cuda")
    num_gpus = 0 if asked == "cpu" else launch.count_gpus()
    if asked == "cpu" or (asked == "auto" and not num_gpus):
        return "cpu"
    if not num_gpus:
        raise PreflightError("--device cuda: no GPU here (nvidia-smi -L, CUDA_VISIBLE_DEVICES); use --device cpu")
    if num_gpus < nproc:
        raise PreflightError(f"{nproc} ranks but {num_gpus} GPUs; use --nproc {num_gpus} or --device cpu")
    return "cuda"


def _set_threads(place: Device, found: list[config.RunConfig], num_processes: int) -> None:
    """For all processes that are started: cores are shared by those that compile at the same time."""
    threads = str(max(1, launch.num_cores() // num_processes))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
    if place == "cpu" and any(one.compile.backend == "inductor" for one in found):
        os.environ["CXX"] = launch.cxx_compiler()


def _folder(logs: Path | None) -> Path:
    folder = logs or Path(new_name("bench"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    ending.run(app, "tpcompile bench")
