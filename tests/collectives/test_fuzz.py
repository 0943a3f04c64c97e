"""A short run of `scripts/fuzz_collectives.py`, and that it finds a wrapper which is wrong on purpose."""

from __future__ import annotations

from scripts.fuzz_collectives import fuzz


def test_random_calls_are_right_or_refused_on_all_ranks_alike() -> None:
    result = fuzz(1500, 3, 1, timeout_s=200)
    assert result["failures"] == []
    counts = result["counts_by_rank"][1]
    assert sum(counts.values()) == 1500 + sum(n for kind, n in counts.items() if kind.endswith("gradient"))
    assert {"refused: dtype", "refused: device", "refused: group", "all_to_all gradient"} <= set(counts)


def test_a_wrong_wrapper_is_found() -> None:
    result = fuzz(300, 2, 1, broken="all_reduce", timeout_s=100)
    assert any("all_reduce" in failure and "value" in failure for failure in result["failures"])
