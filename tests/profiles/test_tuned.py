"""`max-autotune`: all ranks run the kernels that the first rank has chosen."""

from __future__ import annotations

import re

import pytest

from tests.profiles import ranks
from tpcompile.testing import run_on_ranks


@pytest.mark.slow
def test_ranks_whose_clocks_differ_run_the_same_kernels() -> None:
    first, second = run_on_ranks(ranks.tuned)
    assert first["alone"] != second["alone"], "each by itself, they do not"
    assert first["together"] == second["together"] == first["alone"]


def test_a_rank_that_times_something_else_is_named() -> None:
    nothing, text = run_on_ranks(ranks.asks_for_other_times)
    assert nothing == ""
    assert re.fullmatch(r"choice 1 .*\[2, 16, 16\]: a on rank 0 / .*\[2, 32, 16\]: a on rank 1", text)


def test_a_first_rank_that_chooses_nothing_is_named_in_time() -> None:
    _, text = run_on_ranks(ranks.first_rank_tunes_nothing)
    assert re.match(r"rank 1 .*choice 1 of rank 0, bmm: a, .* 1 s: rank 0", text)
