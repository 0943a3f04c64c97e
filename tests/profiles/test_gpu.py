"""What needs GPUs: real CUDA graphs with NCCL collectives, their values, their end, and ranks that are killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forked import ROOT

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def parts(nproc: int, *names: str) -> subprocess.CompletedProcess[str]:
    """Those of scripts/gpu_profiles.py."""
    chosen = [word for name in names for word in ("--only", name)]
    command = [sys.executable, str(ROOT / "scripts/gpu_profiles.py"), "--nproc", str(nproc), *chosen]
    return subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)


@pytest.mark.gpu(1)
def test_replays_are_compiled_calls_and_jobs_with_live_graphs_end() -> None:
    done = parts(1, "values-wan14b_8", "end-")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu(2)
def test_ranks_that_are_killed_or_differ_are_named() -> None:
    done = parts(2, "killed-", "differs-", "end-", "gate-fault")
    assert done.returncode == 0, done.stdout + done.stderr
