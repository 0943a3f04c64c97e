"""Ranks of two domains that wait for each other: neither domain could tell from its own ranks alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpcompile.evidence.causes import Cause

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_rank_that_is_out_of_step_with_its_data_parallel_peer_is_named(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "tests/sentinel/two_domains.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/verdict.json")]
    red = [check for verdict in verdicts for check in verdict["checks"] if check["status"] == "fail"]
    assert red, done.stderr
    for check in red:
        assert (check["cause"], check["ranks"]) == (Cause.STUCK_COLLECTIVE.value, [3])
        assert check["line"]["code"].startswith("dist.all_gather(")
