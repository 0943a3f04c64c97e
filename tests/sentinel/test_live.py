"""The sentinel on real gloo ranks: programs that agree, policies that go on, and its own failures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sentinel import scenarios
from tpcompile.evidence.records.causes import Cause
from tpcompile.testing import run_on_ranks

Results = list[dict[str, dict[str, Any]]]
LIMIT_S = 400
# The ranks' limit strikes first: it names the ranks that hang.
pytestmark = [pytest.mark.timeout(LIMIT_S + 60), pytest.mark.long]
AGREE = ["clean", "reset_in_mid_run", "opposite_order", "one_ranks_own_function", "uneven", "uneven_and_slow",
         "uneven_in_parts", "compiled_while_handling", "functions_come_and_go", "modules", "slow", "slow_and_eager",
         "slow_compile", "allowed", "limit_on_both", "failed_quietly_on_both", "closed"]  # fmt: skip
DIVERGE = ["warned", "called_back", "one_rank_recompile", "not_compiled_on_one_rank", "eager_on_one_rank",
           "policy_fails", "limit_on_one_rank",
           "failed_quietly_on_one_rank", "failed_loudly_on_one_rank"]  # fmt: skip
FAIL = ["follower_dies", "store_gone"]


@pytest.fixture(scope="module")
def results() -> Results:
    return run_on_ranks(scenarios.run, [*AGREE, *DIVERGE, *FAIL], timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", AGREE[:-1])
def test_programs_that_agree_are_left_alone(results: Results, name: str) -> None:
    for rank in results:
        assert rank[name]["causes"] == []


def test_no_call_sends_anything_while_nothing_compiles(results: Results) -> None:
    for rank in results:
        assert rank["clean"]["steady"] < 25, "200 calls: a timer may compare cached variants, a call sends nothing"
        assert (rank["clean"]["compiles"], rank["clean"]["calls"]) == (2, [204])


def test_compiles_after_a_reset_are_watched(results: Results) -> None:
    assert [rank["reset_in_mid_run"]["compiles"] for rank in results] == [2, 2]


def test_a_function_that_is_gone_is_forgotten(results: Results) -> None:
    assert [rank["functions_come_and_go"]["known"] for rank in results] == [[1, 1, 1, 0]] * 2


def test_a_compile_in_an_except_block_has_not_failed(results: Results) -> None:
    assert [rank["compiled_while_handling"]["waited"] for rank in results] == [1, 1]


def test_a_rank_that_waits_goes_on_after_a_finding_about_no_position(results: Results) -> None:
    for rank in results:
        assert rank["eager_on_one_rank"]["causes"] == [[], [Cause.SHAPE.value]]


def test_a_policy_may_end_the_process_or_fail(results: Results) -> None:
    assert [rank["policy_fails"] for rank in results] == [{"ends": ([7], 1, True), "fails": ([], 1, True)}] * 2


def test_every_way_to_compile_a_module_is_a_region(results: Results) -> None:
    assert [rank["modules"]["calls"] for rank in results] == [[6], [6]]  # one class, three calls of two objects


def test_a_closed_sentinel_leaves_no_thread_and_no_socket(results: Results) -> None:
    assert [rank["closed"]["threads"] for rank in results] == [0, 0]
    assert results[1]["closed"]["sockets"] == 0  # rank 0 also serves the store, with sockets of the server's own


def test_with_warn_a_divergence_is_reported_once_and_the_job_goes_on(results: Results) -> None:
    for rank in results:
        assert len(rank["warned"]["causes"]) == 1
        assert rank["warned"]["calls"] == [3]


def test_a_callback_gets_the_verdict_on_every_rank(results: Results) -> None:
    for rank in results:
        assert rank["called_back"]["got"] == [1]


def test_a_one_rank_recompile_names_the_stride_and_the_rank(results: Results) -> None:
    for rank in results:
        assert rank["one_rank_recompile"]["causes"] == [[Cause.STRIDE.value]]
        assert sorted(rank["one_rank_recompile"]["ranks"][0]) == [(0,), (1,)]


def test_a_watched_call_that_ends_without_a_compile_is_a_divergence(results: Results) -> None:
    assert all(rank["not_compiled_on_one_rank"]["causes"] for rank in results)


def test_a_rank_that_alone_reaches_the_recompile_limit_is_named(results: Results) -> None:
    assert [rank["limit_on_one_rank"]["gave_up"] for rank in results] == [False, True]
    for rank in results:
        assert rank["limit_on_one_rank"]["causes"] == [[Cause.RECOMPILE_LIMIT.value]]
        assert {(cause, ranks) for cause, ranks, _ in rank["limit_on_one_rank"]["checks"]} == {
            (Cause.RECOMPILE_LIMIT.value, (1,))
        }


def test_ranks_that_reach_the_recompile_limit_together_are_left_alone(results: Results) -> None:
    for rank in results:
        assert (rank["limit_on_both"]["gave_up"], rank["limit_on_both"]["causes"]) == (True, [])


def test_a_compile_that_fails_quietly_on_one_rank_is_named(results: Results) -> None:
    assert [rank["failed_quietly_on_one_rank"]["failed"] for rank in results] == [False, True]
    for rank in results:
        (causes,) = rank["failed_quietly_on_one_rank"]["causes"]
        assert causes[-1] == Cause.COMPILE_FAILED.value and set(causes[:-1]) <= {Cause.ENVIRONMENT.value}


def test_ranks_whose_compiles_fail_alike_are_left_alone(results: Results) -> None:
    for rank in results:
        assert (rank["failed_quietly_on_both"]["failed"], rank["failed_quietly_on_both"]["causes"]) == (True, [])


def test_a_compile_that_raises_is_named_with_the_error_of_the_backend(results: Results) -> None:
    assert [rank["failed_loudly_on_one_rank"]["raised"] for rank in results] == ["", "BackendCompilerFailed"]
    for rank in results:
        ((cause, ranks, observed),) = rank["failed_loudly_on_one_rank"]["checks"]
        assert (cause, ranks) == (Cause.COMPILE_FAILED.value, (1,))
        assert "ImportError: libkernels.so: " in observed


def test_a_sentinel_that_fails_on_one_rank_ends_on_all_and_not_the_job(results: Results) -> None:
    for rank in results:
        assert rank["follower_dies"]["active"] is False
        assert rank["follower_dies"]["causes"] == []
        assert rank["follower_dies"]["compiles"] >= 1


def test_a_store_that_goes_away_ends_the_sentinel_and_not_the_job(results: Results) -> None:
    for rank in results:
        assert rank["store_gone"]["active"] is False
        assert rank["store_gone"]["calls"][-1] >= 1


def test_on_a_mesh_the_ranks_of_one_axis_are_compared() -> None:
    ranks = run_on_ranks(scenarios.on_mesh, world_size=4, timeout_s=120)
    assert [rank["domain"] for rank in ranks] == ["tp 0-1", "tp 0-1", "tp 2-3", "tp 2-3"]
    assert [len(rank["causes"]) for rank in ranks] == [0, 0, 1, 1]
