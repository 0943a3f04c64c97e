"""`measured`: the candidate whose slowest rank is fastest, chosen by all ranks alike."""

from __future__ import annotations

import pytest

from tests.profiles import ranks
from tpcompile.errors import ConfigError
from tpcompile.profiles.call_times import MIN_RATIO, NUM_ROUNDS, WARM_UPS, choose, timings
from tpcompile.testing import run_on_ranks


@pytest.mark.parametrize(
    ("by_rank", "profile"),
    [
        ({0: {"default": 2.0, "graphed": 1.0}, 1: {"default": 2.0, "graphed": 1.5}}, "graphed"),
        ({0: {"default": 2.0, "graphed": 1.0}, 1: {"default": 2.0, "graphed": 2.5}}, "default"),
        ({0: {"default": MIN_RATIO, "graphed": 1.0}}, "default"),
        ({0: {"default": 2.0, "graphed": 1.0}, 1: {"default": 2.0, "graphed": "argument 0 is on cpu"}}, "default"),
    ],
    ids=["faster on both", "slower on one", "about as fast", "refused on one"],
)
def test_the_slowest_rank_decides(by_rank: dict[int, dict[str, float | str]], profile: str) -> None:
    found = choose(by_rank)
    assert found.profile == profile
    assert profile in found.text


def test_no_candidate_is_an_error_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="a set"):
        choose({0: {"default": "a set"}})


def test_candidates_take_turns_and_one_that_is_refused_is_not_called_again() -> None:
    called: list[str] = []

    def refuse() -> None:
        called.append("c")
        raise ConfigError("no")

    found = timings({"a": lambda: called.append("a"), "c": refuse, "b": lambda: called.append("b")}, lambda: None)
    assert found["c"] == "no" and called.count("c") == 1
    turns = "".join(called[called.index("c") + 1 + WARM_UPS :])
    assert turns == ("a" * (len(turns) // NUM_ROUNDS // 2) + "b" * (len(turns) // NUM_ROUNDS // 2)) * NUM_ROUNDS


def test_ranks_with_different_clocks_choose_the_same_and_record_it() -> None:
    found = run_on_ranks(ranks.measured)
    assert found[0] == found[1]
    assert found[0]["profile"] == "graphed", found
    assert found[0]["sum"] == [3, 3]
    ((name, value),) = found[0]["environment"].items()
    assert name.endswith(" summed") and value == "measured: graphed"
    assert found[0]["gradient"] == [1.0], "as one call: those of the measurement leave no trace"


def test_the_only_candidate_is_not_measured() -> None:
    assert run_on_ranks(ranks.only_candidate) == [("default", {}, 1)] * 2
