"""torchrun starts a job again: what the attempt before left in the store is not about this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_job_that_is_started_again_is_not_stopped_by_the_verdict_of_its_first_attempt(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # With a port of its own the store outlives the ranks.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", "2"]
    command = [*launcher, "--max-restarts", "1", str(ROOT / "tests/sentinel/restarted.py")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    finished = {path.name: path.read_text() for path in tmp_path.glob("attempt_*")}
    assert finished == {f"attempt_1_rank_{rank}": "1 compiles" for rank in (0, 1)}  # the first attempt was stopped
