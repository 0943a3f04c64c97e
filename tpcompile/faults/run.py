"""Case -> torchrun in a process tree of its own -> evidence on disk -> Result; torch-free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import tpcompile
from tpcompile.evidence.rundir import RunDir
from tpcompile.faults.case import Case
from tpcompile.faults.judge import Evidence, Result, compile_intervals, judge

_LEFT_S = 30.0
"""Seconds after the limit in which the process tree must have been killed."""
_ROOT = Path(tpcompile.__file__).parent.parent


def run_case(case: Case, directory: Path, *, gpus: str | None = None) -> Result:
    """Run one case with the sentinel and judge it; `gpus` as in `environment`."""
    folder = directory / case.name
    outcome = launch(case, folder, environ=environment(case, directory, gpus=gpus), limit_s=case.limit_s)
    return judge(case, gather(folder, outcome))


def environment(case: Case, directory: Path, *, gpus: str | None = None) -> dict[str, str]:
    """Environment of a case: few threads, an empty compile cache of its own, and the GPUs it may use.

    `gpus` is a value of CUDA_VISIBLE_DEVICES: empty for none, None to leave it as it is.
    """
    cache = directory / case.name / "cache"
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return {
        **os.environ,
        **visible,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def launch(
    case: Case, folder: Path, *, environ: Mapping[str, str], limit_s: float, options: Sequence[str] = ()
) -> dict[str, int | bool]:
    """Run a case under torchrun, its output in log.txt; nothing is left running. Returns how the tree ended."""
    folder.mkdir(parents=True)
    outcome = folder / "outcome.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.world_size)]
    rank = ["-m", "tpcompile.faults.rank", case.name, "--run-dir", str(folder), *options]
    tree = [sys.executable, "-m", "tpcompile.faults.tree", str(limit_s), str(outcome), "--"]
    command = [*tree, sys.executable, *torchrun, *rank]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=dict(environ), stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(limit_s + _LEFT_S)
        finally:
            _end(process)
    if not outcome.exists():
        return {"exit_code": process.returncode, "timed_out": True}
    ended: dict[str, int | bool] = json.loads(outcome.read_text())
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the tree to end, which sweeps its ranks."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEFT_S)
        process.kill()
        process.wait()


def gather(folder: Path, outcome: Mapping[str, int | bool]) -> Evidence:
    """Read what a case left in its folder."""
    run = RunDir(folder / "run")
    path = run.path / "verdict.json"
    verdict_at = path.stat().st_mtime if path.exists() else None
    reached = [float(json.loads(found.read_text())) for found in folder.glob("reached_*.json")]
    timelines = [json.loads(found.read_text()) for found in sorted(run.path.glob("rank_*/timeline.json"))]
    return Evidence(
        verdict=run.read_verdict(),
        verdict_at=verdict_at,
        reached_at=min(reached, default=None),
        compiling=tuple(compile_intervals(_pairs(t), end=verdict_at) for t in timelines) if verdict_at else (),
        timed_out=bool(outcome["timed_out"]),
        exit_code=int(outcome["exit_code"]),
    )


def _pairs(timeline: Iterable[Sequence[float | str]]) -> list[tuple[float, str]]:
    return [(float(at), str(text)) for at, text in timeline]
