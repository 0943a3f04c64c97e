"""Cases of processes, eager collectives, caches and data: two of them for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.case import CASES
from tests.faults.judge import Outcome
from tests.faults.sweep import sweep
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import replay


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path, forked_ranks: None) -> None:
    (result,) = sweep([CASES["killed"]], tmp_path)
    assert result.outcome == Outcome.NAMED, result
    assert result.found is not None and result.found.ranks == (0,)
    left = RunDir(tmp_path / "killed" / "run")
    live, again = left.read_verdict(), replay(left)
    assert live is not None and any("rank 0 has died" in check.observed for check in live.checks)
    assert (again.summary, again.exit_code, again.lead) == (live.summary, live.exit_code, live.lead)


@pytest.mark.slow
def test_a_norm_weight_with_a_different_bit_is_named(tmp_path: Path, forked_ranks: None) -> None:
    (result,) = sweep([CASES["flipped_bit"]], tmp_path)
    assert result.outcome == Outcome.NAMED, result
    assert result.found is not None and "weight norm" in result.found.text
