"""Cases of processes, eager collectives, caches and data: none hides another, and two of them for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.corpus.case import Case
from tpcompile.corpus.cases import ALL, cache, data, eager, process
from tpcompile.corpus.judge import Outcome
from tpcompile.corpus.run import run_case

CASES = (*process.CASES, *eager.CASES, *cache.CASES, *data.CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_other_case_has_its_name(case: Case) -> None:
    assert ALL[case.name] is case


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    result = run_case(ALL["killed"], tmp_path)
    assert result.outcome == Outcome.NAMED, result
    assert result.found is not None and result.found.ranks == (0,)


@pytest.mark.slow
def test_a_norm_weight_with_another_bit_is_named(tmp_path: Path) -> None:
    result = run_case(ALL["flipped_bit"], tmp_path)
    assert result.outcome == Outcome.NAMED, result
    assert result.found is not None and "weight norm" in result.found.text
