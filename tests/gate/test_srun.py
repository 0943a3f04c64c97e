"""The gate in a job step of srun: ranks without an agent, which have a store all the same."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, Ended, free_port, run_python
from tests.gate.runs import AOT
from tpcompile.errors import ExitCode
from tpcompile.evidence.rundir import RunDir

pytestmark = pytest.mark.timeout(300)


def step(run_dir: Path, target: str, *settings: str, port: int | None = None) -> Ended:
    """`srun -n 2 repro/tp_compile_repro.py --target ...`, with the variables that Slurm 22.05 sets."""
    sets = [part for setting in (*AOT, *settings) for part in ("--set", setting)]
    flags = ["--target", f"tests.gate.own:{target}", *sets, "--run-dir", run_dir, "--device", "cpu"]
    variables = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_PORT": str(port or free_port()),
    }  # fmt: skip
    environ = {**os.environ, **variables, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return run_python([Path(__file__).with_name("step.py"), *flags], environ=environ)


def test_a_healthy_target_passes_and_nothing_is_left(tmp_path: Path) -> None:
    ended = step(tmp_path / "run", "functional")
    assert "ended with [0, 0]" in ended.stdout, ended.stderr[-1500:]
    assert "PASS (exit 0)" in ended.stdout
    assert ended.left_running == ()


def test_a_divergence_is_named_with_the_line_of_the_user(tmp_path: Path) -> None:
    ended = step(tmp_path / "run", "functional", "fault=dtype")
    assert "ended with [1, 1]" in ended.stdout
    assert "own.py" in ended.stdout


def test_a_rank_0_that_is_killed_is_named_by_the_rank_that_is_left(tmp_path: Path) -> None:
    ended = step(tmp_path / "run", "ending", "how=killed on 0")
    assert f"ended with [-9, {ExitCode.FAIL:d}]" in ended.stdout, ended.stderr[-1500:]
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None
    assert re.search(r"rank 0 .*; its process \d+ died", verdict.summary)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    """By something that takes connections and never answers, which torch would wait for without a limit."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        ended = step(tmp_path / "run", "functional", "gate.store_timeout_s=5", port=taken.getsockname()[1])
    assert f"ended with [{ExitCode.ENVIRONMENT:d}, {ExitCode.ENVIRONMENT:d}]" in ended.stdout
    assert "localhost:" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.fixture
def srun() -> list[str]:
    """The real one, where there is a cluster that takes a job of two tasks."""
    command = ["srun", "--ntasks=2", "--overcommit", "--immediate=20"]
    with suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*command, "true"], capture_output=True, check=False, timeout=60).returncode == 0:
            return command
    pytest.skip("there is no Slurm that takes a job here")


def test_a_real_srun(srun: list[str], tmp_path: Path) -> None:
    flags = ["--target", "tests.gate.own:functional", "--set", AOT[0], "--device", "cpu", "--run-dir", tmp_path / "run"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    command = [*srun, sys.executable, "-m", "tpcompile", "gate", *flags]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=250)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-1500:]
    assert "PASS (exit 0)" in ended.stdout
