"""`Sentinel.agree` on real gloo ranks: a value that differs is named at its call, its line and its rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sentinel import saying
from tests.sentinel.saying import ODD
from tpcompile.evidence.records.causes import Cause
from tpcompile.testing import run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(330)]
VALUE, CALLS = Cause.AGREED_VALUES.value, Cause.CALL_COUNT.value
NAMES = [
    "set_apart", "token", "token_while_it_runs", "router", "drifted", "loss", "left_out", "stopped", "never",
    "in_a_domain", "healthy", "refused",
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[dict[str, Any]]]]:
    return run_on_ranks(saying.run, NAMES, world_size=4, timeout_s=270)


def finding(results: list[dict[str, list[dict[str, Any]]]], name: str) -> dict[str, Any]:
    """The one finding of a scenario: ranks that left before it was made know none, all others the same."""
    found = [one for rank in results for one in rank[name] if "cause" in one]
    assert found and all(one == found[0] for one in found), results
    return found[0]


@pytest.mark.parametrize(
    ("name", "cause", "says", "code"),
    [
        ("token", VALUE, "'tokens' (call 4, step 3)", 'sentinel.agree("tokens", token, step=step)  # the line of'),
        ("token_while_it_runs", VALUE, "'tokens' (call 31)", 'sentinel.agree("tokens", torch.tensor([step + '),
        ("router", VALUE, "'experts[0]' (call 3)", "router(x)  # the line of the router"),
        ("drifted", VALUE, "\"parameters['weight']\" (call 11, step 10)", 'sentinel.agree("parameters", '),
        ("loss", VALUE, "'loss' (call 2): 1.25 on ranks 0-1,3, 1.5 on rank 2", 'sentinel.agree("loss", 1.5 if'),
        ("set_apart", VALUE, "'hidden' (call 6, step 5)", 'sentinel.agree("hidden", torch.ones(3) / '),
        ("left_out", CALLS, "'loss' (call 4) on rank 2", 'sentinel.agree("loss", float(step))'),
        ("stopped", CALLS, "rank 2 ended after 4 calls of agree", 'sentinel.agree("tokens", torch.tensor([step]))'),
        ("never", CALLS, "rank 2 ended after 0 calls of agree", 'sentinel.agree("tokens", torch.tensor([1]))'),
    ],
)
def test_what_differs_is_named_with_its_call_its_line_and_its_rank(
    results: list[dict[str, list[dict[str, Any]]]], name: str, cause: str, says: str, code: str
) -> None:
    found = finding(results, name)
    assert found["cause"] == cause
    assert says in found["says"]
    assert (list(found["ranks"]), found["is_rank_known"]) == ([ODD], True)
    assert found["code"].startswith(code)


def test_the_line_that_set_the_ranks_apart_is_named_where_lines_are_recorded(
    results: list[dict[str, list[dict[str, Any]]]],
) -> None:
    assert finding(results, "set_apart")["set_at"] in ("if step >= 5 and dist.get_rank() == ODD:", "return temperature")
    assert finding(results, "token")["set_at"] == ""


def test_it_is_found_while_the_job_runs(results: list[dict[str, list[dict[str, Any]]]]) -> None:
    assert [rank["token_while_it_runs"][-1]["before_the_end"] for rank in results] == [1] * 4


def test_only_ranks_of_one_domain_must_agree(results: list[dict[str, list[dict[str, Any]]]]) -> None:
    found = finding(results, "in_a_domain")
    assert (list(found["ranks"]), found["is_rank_known"]) == ([2, 3], False)
    assert [rank["in_a_domain"] for rank in results[:2]] == [[], []]


def test_equal_values_of_all_kinds_are_left_alone_and_calls_send_nothing(
    results: list[dict[str, list[dict[str, Any]]]],
) -> None:
    for rank in results:
        (one,) = rank["healthy"]
        assert one["operations"] < 40, "1,800 calls: a timer may compare links, a call sends nothing"


def test_what_cannot_be_compared_is_refused_with_what_to_do(
    results: list[dict[str, list[dict[str, Any]]]],
) -> None:
    for rank in results:
        (one,) = rank["refused"]
        words = ["inside of", "full_tensor", "tensors, numbers", "meta", "dense parts", "characters", "every", "every"]
        assert [word in error for word, error in zip(words, one["errors"], strict=True)] == [True] * len(words), one
