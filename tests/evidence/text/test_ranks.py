from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpcompile.evidence.text.ranks import exact_ranks, is_among, ranks_in_name, ranks_text

TEXTS = {
    (): "",
    (7,): "7",
    (0, 1, 2, 5): "0-2,5",
    (1, 4, 7): "1,4,7",
    (0, 2): "0,2",
    tuple(range(1, 1022, 4)): "1-1021 step 4",
    (0, 1, 2, *range(5, 1022, 4)): "0-2,5-1021 step 4",
    tuple(range(1024)): "0-1023",
    (*range(640), *range(641, 1024)): "0-639,641-1023",
}


@pytest.mark.parametrize("ranks", TEXTS)
def test_ranks_are_ranges_with_a_step(ranks: tuple[int, ...]) -> None:
    assert exact_ranks(ranks) == ranks_text(ranks) == TEXTS[ranks]


@given(st.sets(st.integers(0, 300)), st.integers(1, 9))
def test_a_text_of_ranks_has_these_ranks_and_no_other(drawn: set[int], step: int) -> None:
    for ranks in (sorted(drawn), sorted(drawn | {*range(0, 300, step)})):
        text = exact_ranks(ranks)
        assert [rank for rank in range(301) if is_among(rank, text)] == ranks
        assert ranks_in_name(f"tp2 {text}") == text


@pytest.mark.parametrize("name", ["tp", "", "dp shards", "tp 0-3 and more", "step 4"])
def test_a_name_without_ranks_has_none(name: str) -> None:
    assert ranks_in_name(name) == ("4" if name == "step 4" else "")


def test_many_ranks_without_a_rule_are_counted() -> None:
    ranks = sorted(random.Random(0).sample(range(1024), 300))
    text = ranks_text(ranks)
    assert len(text) < 100 and text.endswith(" more")
    assert ranks_text(ranks[:12]) == exact_ranks(ranks[:12])
