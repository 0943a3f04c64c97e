"""torchrun starts a job again: what the attempt before left in the store is not about this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import ROOT, TORCHRUN, free_port, run_python


@pytest.mark.slow
def test_a_job_that_is_started_again_is_not_stopped_by_the_verdict_of_its_first_attempt(tmp_path: Path) -> None:
    # With a port of its own the store outlives the ranks.
    command = [*TORCHRUN, "--master-port", str(free_port()), "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run_python([*command, ROOT / "tests/sentinel/restarted.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    finished = {path.name: path.read_text() for path in tmp_path.glob("attempt_*")}
    assert finished == {f"attempt_1_rank_{rank}": "1 compiles" for rank in (0, 1)}  # the first attempt was stopped
