"""Case -> torchrun in a process tree of its own -> evidence on disk -> Result."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.faults import alarms
from tests.faults.case import Case
from tests.faults.healthy.program import Program
from tests.faults.judge import Result, gather, judge
from tpcompile.launch import torchrun

_LEFT_S = 30.0
"""Seconds after the limit in which the process tree must have been killed."""
_ROOT = Path(__file__).resolve().parents[2]
Ended = dict[str, int | bool]
"""How a process tree ended: `exit_code` and `timed_out` of `tpcompile.process_tree.Outcome`."""


def run_case(case: Case, directory: Path, *, gpus: str | None = None) -> Result:
    """Run one case with the sentinel and judge it; `gpus` as in `environment`."""
    folder = directory / case.name
    environ = environment(folder / "cache", gpus=gpus)
    if isinstance(case, Program):
        draw = case.first_draw()
        ended = launch(case, folder, environ=environ, limit_s=case.limit_s, options=["--draw", draw.to_json()])
        return alarms.judge(case, draw, folder, ended)
    ended = launch(case, folder, environ=environ, limit_s=case.limit_s)
    verdict = folder / "run" / "verdict.json"
    codes = (int(ended["exit_code"]),)
    return judge(case, gather(folder, verdict, is_hang=bool(ended["timed_out"]), codes=codes))


def environment(cache: Path, *, gpus: str | None = None) -> dict[str, str]:
    """Environment of a case: few threads, a folder for the compile cache, and the GPUs it may use.

    `gpus` is a value of CUDA_VISIBLE_DEVICES: empty for none, None to leave it as it is.
    """
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
) -> Ended:
    """Run a case under torchrun with its variables of each rank; `options` are those of `tests.faults.rank`."""
    command = torchrun_with(rank_command(case, folder, options), nproc=case.world_size, own=case.env)
    return run_in_tree(command, folder, environ=environ, limit_s=limit_s)


def rank_command(case: Case, folder: Path, options: Sequence[str]) -> list[str]:
    """Arguments of Python for one rank of a case."""
    module = case.program.__module__
    return ["-m", "tests.faults.rank", module, case.name, "--run-dir", str(folder), *options]


def torchrun_with(rank: Sequence[str], *, nproc: int, own: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Command that starts Python with the arguments `rank` on `nproc` ranks, each with variables of its own.

    A shell sets them: Python reads its hash seed when it starts, and torch reads variables when it is imported.
    """
    exports = [f"{rank}) export {_assignments(variables)} ;;" for rank, variables in own.items() if variables]
    shell = f'case $RANK in {" ".join(exports)} esac; exec "$0" "$@"'
    return torchrun(nproc, ["--no-python", "sh", "-c", shell, sys.executable, *rank])


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def run_in_tree(command: Sequence[str], folder: Path, *, environ: Mapping[str, str], limit_s: float) -> Ended:
    """Run a command, its output in folder/log.txt; nothing is left running. Returns how the tree ended."""
    folder.mkdir(parents=True)
    outcome = folder / "outcome.json"
    tree = [sys.executable, "-m", "tests.faults.tree", str(limit_s), str(outcome), "--"]
    command = [*tree, *command]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit_s + _LEFT_S)
        finally:
            _end(process)
    if not outcome.exists():
        return {"exit_code": process.returncode, "timed_out": True}
    ended: Ended = json.loads(outcome.read_text())
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the tree, which sweeps its ranks; nothing to do where it has ended."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LEFT_S)
    process.kill()
    process.wait()
