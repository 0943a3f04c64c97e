"""Many planted cases beside each other, with the sentinel and with other tools -> results in the order of the cases."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from tests.faults import run
from tests.faults.alarms import alarms
from tests.faults.case import Planted, Truth
from tests.faults.columns import COLUMNS, LIMIT_S, Report, text_of
from tests.faults.healthy.program import Program
from tests.faults.judge import Judged, Outcome, Result, described, gather, judge, time_to_verdict
from tpcompile.errors import DirectoryTakenError
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.launch import count_gpus

Device = Literal["auto", "cpu"]


def sweep(
    cases: Sequence[Planted],
    run_dir: Path | None,
    *,
    jobs: int = 1,
    tools: Sequence[str] = (),
    device: Device = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Run the cases, `jobs` at a time, each in a folder of its own below `run_dir` (None: nothing is kept).

    `tools` are keys of `columns.COLUMNS`. On GPUs every case that runs has its own, as far as there are enough.
    Raises DirectoryTakenError when `run_dir` holds a run of one of the cases.
    """
    taken = [run_dir / case.name for case in cases if run_dir is not None and (run_dir / case.name).exists()]
    if taken:
        raise DirectoryTakenError(taken[0])
    results: dict[str, Result] = {}
    columns: dict[str, dict[str, str]] = {case.name: {} for case in cases}
    with tempfile.TemporaryDirectory(prefix="tpcompile-faults-") if run_dir is None else nullcontext(run_dir) as folder:
        asked = _asked(cases, Path(folder).resolve(), tools)
        size = max(case.world_size for case in cases)
        slots = _slots(jobs, gpus=visible_gpus(device), size=size)
        for launch, ended in run.finished(list(asked), slots):
            case, tool = asked[launch]
            if tool:
                columns[case.name][tool] = text_of(COLUMNS[tool].read(launch.out), timed_out=ended.is_hang)
                continue
            results[case.name] = result_of(case, launch.out, ended)
            progress(f"{case.name}: {results[case.name].outcome.value}")
    for tool in tools:
        if not COLUMNS[tool].is_here():
            columns = {name: {**reports, tool: Report.NOT_HERE.value} for name, reports in columns.items()}
    return [results[case.name].model_copy(update={"columns": columns[case.name]}) for case in cases]


def _asked(cases: Iterable[Planted], folder: Path, tools: Iterable[str]) -> dict[run.Launch, tuple[Planted, str]]:
    """Launch -> its case and tool: each with the sentinel, where the tool is "", and with the tools that are here."""
    here = [tool for tool in tools if COLUMNS[tool].is_here()]
    asked = {}
    for case in cases:
        asked[launch_of(case, folder / case.name)] = case, ""
        for tool in here:
            asked[_launch_with(case, folder / f"{case.name}-{tool}", tool)] = case, tool
    return asked


def launch_of(case: Planted, out: Path) -> run.Launch:
    """The case under the sentinel, with its variables of each rank."""
    options = ("--draw", case.first_draw().to_json()) if isinstance(case, Program) else ()
    return run.Launch(
        out=out,
        command=case.command(out, *options),
        world_size=case.world_size,
        limit_s=case.limit_s,
        environ={**run.FEW_THREADS, **_on_cpus(case)},
        own=case.env,
    )


def _launch_with(case: Planted, out: Path, tool: str) -> run.Launch:
    """The case with that tool, and without the sentinel."""
    column = COLUMNS[tool]
    return run.Launch(
        out=out,
        command=case.command(out, "--bare", *column.options),
        world_size=case.world_size,
        limit_s=LIMIT_S,
        environ={**run.FEW_THREADS, **_on_cpus(case), **column.environ(out)},
        own=case.env,
    )


def _on_cpus(case: Planted) -> dict[str, str]:
    return {} if case.on_gpus else {"CUDA_VISIBLE_DEVICES": ""}


def result_of(case: Planted, folder: Path, ended: run.Ended) -> Result:
    """The row of a case, from what its run left; a healthy program with drawn parameters is green without alarms."""
    if isinstance(case, Program):
        found = alarms(case, case.first_draw(), folder, ended)
        outcome = Outcome.FALSE_ALARM if found else Outcome.GREEN
        return Result(
            name=case.name,
            expected="",
            outcome=Outcome.HANG if ended.is_hang else outcome,
            why="; ".join(found),
        )
    codes = tuple(ended.codes.values())
    evidence = gather(folder, folder / "run" / "verdict.json", is_hang=ended.is_hang, codes=codes)
    judged = judge(case.truth, evidence)
    seconds, compile_s = time_to_verdict(evidence)
    return Result(
        name=case.name,
        expected=case.cause.value if case.cause else "",
        outcome=judged.outcome,
        why=_why(case.truth, judged, codes),
        found=judged.found,
        seconds=seconds,
        compile_s=compile_s,
    )


def _why(truth: Truth, judged: Judged, codes: Sequence[int]) -> str:
    """What is wrong, what would be right, and how the job ended; empty for an expected outcome."""
    if judged.outcome.is_right:
        return ""
    right = f"{', '.join(sorted(truth.causes))}, rank {ranks_text(sorted(truth.ranks[0]))}"
    line = f", {truth.source}:{ranks_text(truth.lines)}" if truth.lines else ""
    expected = "" if truth.is_healthy else f"expected {right}{line}"
    return "; ".join(filter(None, [described(judged), expected, f"exit code {', '.join(map(str, codes))}"]))


def visible_gpus(device: Device) -> list[str] | None:
    """Indices of the GPUs of this machine; empty for a run on CPUs, None on a machine without GPUs."""
    if device == "cpu":
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return list(filter(None, chosen.split(",")))
    every = list(map(str, range(count_gpus())))
    return every or None


def _slots(jobs: int, *, gpus: Sequence[str] | None, size: int) -> list[dict[str, str]]:
    """Variables of the cases that run beside each other: the GPUs that each sees."""
    seen = [gpus_of(slot, gpus=gpus, size=size) for slot in range(jobs)]
    return [{} if own is None else {"CUDA_VISIBLE_DEVICES": own} for own in seen]


def gpus_of(slot: int, *, gpus: Sequence[str] | None, size: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of the cases of one slot: `size` GPUs of its own while they last, then shared ones."""
    if gpus is None:
        return None
    first = slot * size % max(size, len(gpus) - len(gpus) % size)
    return ",".join(gpus[first : first + size])
