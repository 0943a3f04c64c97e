"""Ranks of two domains that wait for each other: neither domain could tell from its own ranks alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import ROOT, torchrun
from tpcompile.evidence.records import CheckId
from tpcompile.evidence.records.causes import Cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "rank", "code"),
    [("two_domains.py", 3, "dist.all_gather("), ("barrier_too_early.py", 2, "dist.barrier()  # too early")],
)
def test_a_rank_that_is_out_of_step_with_its_data_parallel_peer_is_named(
    tmp_path: Path, program: str, rank: int, code: str
) -> None:
    done = torchrun([ROOT / "tests/sentinel" / program], nproc=4, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/verdict.json")]
    red = [check for verdict in verdicts for check in verdict["checks"] if check["status"] == "fail"]
    assert red, done.stderr
    assert all(check["ranks"] == [rank] for check in red)
    for check in red:
        if check["id"] != CheckId.SAME_BRANCHES.value:  # where lines are recorded, the branch that led there
            assert check["cause"] == Cause.STUCK_COLLECTIVE.value
            assert check["line"]["code"].startswith(code)
