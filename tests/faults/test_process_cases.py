"""Cases of processes, eager collectives, caches and data: none hides another, and two of them for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.faults.cases import ALL, by_name, eager, process
from tpcompile.faults.judge import Outcome
from tpcompile.faults.run import run_case


def test_a_second_case_of_one_name_is_refused_wherever_it_is() -> None:
    first, other = process.CASES[0], eager.CASES[0]
    again = first.model_copy(update={"what": "something else"})
    assert by_name([[first], [other]]) == {first.name: first, other.name: other}
    for groups in ([[first, again]], [[first], [other], [again]]):
        with pytest.raises(AssertionError, match=f"two cases of the corpus are named '{first.name}'"):
            by_name(groups)


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path, forked_ranks: None) -> None:
    result = run_case(ALL["killed"], tmp_path)
    assert result.outcome == Outcome.NAMED, result
    assert result.found is not None and result.found.ranks == (0,)


@pytest.mark.slow
def test_a_norm_weight_with_another_bit_is_named(tmp_path: Path, forked_ranks: None) -> None:
    result = run_case(ALL["flipped_bit"], tmp_path)
    assert result.outcome == Outcome.NAMED, result
    assert result.found is not None and "weight norm" in result.found.text
