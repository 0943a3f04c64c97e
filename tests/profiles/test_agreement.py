"""Ranks under different profiles or signatures are named on all of them, in bounded time; a replay asks nobody."""

from __future__ import annotations

import re

import pytest

from tests.profiles import ranks
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.profiles.agreement import Vote, difference
from tpcompile.testing import run_on_ranks


def test_equal_ranks_capture_together_and_replays_do_not_use_the_store() -> None:
    found = run_on_ranks(ranks.equal_ranks)
    expected = {
        "sums": [[3, 3], [3, 3, 3], [5, 5], [5, 5, 5], [5, 5]],
        "captures": 2, "replays": 5, "keys": 0, "profile": "graphed",
    }  # fmt: skip
    assert found == [expected, expected]


def test_different_profiles_are_named_with_both_values_on_both_ranks() -> None:
    says = "summed has different profiles: graphed on rank 0 / default on rank 1; all ranks must"
    for text in run_on_ranks(ranks.different_profiles):
        assert text.startswith(says), text


def test_different_signatures_are_named_at_their_capture() -> None:
    for first, second in run_on_ranks(ranks.different_signatures):
        assert first == ""
        assert re.match(r"summed .*\(0: float32\[3\]\), .* rank 0 / \(0: float32\[4\]\)", second), second


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last() -> None:
    text, nothing = run_on_ranks(ranks.one_rank_captures)
    assert nothing == ""
    assert re.match(r"rank 0 captures summed .*graphed .*\(0: float32\[3\]\)", text)
    assert re.search(r"rank 1 .* 1 s", text)
    assert re.search(r"rank 1 .* step 2, .*graphed \(0: float32\[2\]\)", text)


def test_a_rank_that_comes_late_does_not_go_on_alone() -> None:
    first, second = run_on_ranks(ranks.comes_late)
    assert first == second
    assert re.search("rank 1 has not", first)


def test_a_rank_that_has_died_is_not_waited_for() -> None:
    text, _ = run_on_ranks(ranks.has_died, timeout_s=60)
    assert re.search("rank 1 .*ended$", text), text


def test_a_capture_that_fails_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_on_ranks(ranks.one_rank_cannot_capture)
    assert first == second
    assert first.startswith("summed ") and first.endswith("(rank 1)")


def test_graphs_are_released_before_a_process_group_is_destroyed() -> None:
    assert run_on_ranks(ranks.destroys_group) == [[True, False]] * 2


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({}, ""),
        ({"profile": "default"}, "mlp has different profiles: graphed on rank 0 / default on rank 1"),
        ({"signature": ""}, r"mlp has different signatures: (x) on rank 0 / none on rank 1"),
        ({"program": "other"}, "different programs: mlp on rank 0 / other on rank 1"),
    ],
)
def test_what_differs_is_said_with_its_values(theirs: dict[str, str], says: str) -> None:
    mine = Vote(program="mlp", profile="graphed", signature="(x)")
    text, ranks = difference(ByRank({0: mine, 1: mine.model_copy(update=theirs)}))
    assert (text.partition(";")[0], ranks) == (says, (1,) if says else ())
