"""The judge of generated faults: only the right cause, rank and line are named; red on a healthy case is an alarm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.drawn.plan import Drawn, fault_case, healthy_case
from tests.faults.judge import Evidence, Outcome, judge
from tests.faults.names import Route
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Divergence,
    DivergenceClass,
    Layer,
    RankGroup,
    Status,
    UserLine,
    Verdict,
)
from tpcompile.evidence.records.causes import Cause

_STRIDE = fault_case(7, program="hand_mlp", operator="input_stride")
_BRANCH = fault_case(7, program="hand_mlp", operator="branch")
_SKIPPED = fault_case(7, program="hand_mlp", operator="skipped_batch")
_SILENT = fault_case(7, program="hand_mlp", operator="not_compiled")
_HEALTHY = healthy_case(7, program="hand_mlp")


def _line(case: Drawn, *, shifted: int = 0, file: str = "program.py") -> UserLine:
    assert case.truth.lines
    return UserLine(file=f"/somewhere/{file}", line=case.truth.lines[-1] + shifted, function="main", code="")


def _verdict(*checks: Check, divergences: tuple[Divergence, ...] = ()) -> Verdict:
    return Verdict(
        status=Status.FAIL, exit_code=1, world_size=2, preset="", modes=(), summary="", checks=checks,
        divergences=divergences,
    )  # fmt: skip


def _green(*checks: Check) -> Verdict:
    return _verdict(*checks).model_copy(update={"status": Status.SKIPPED, "exit_code": 6})


def _red(case: Drawn, **changed: Any) -> Evidence:
    """What names the case, with some fields changed."""
    right = Check(
        name="guards equal", mode="", status=Status.FAIL, expected="", observed="", cause=Cause.STRIDE,
        ranks=(case.rank,), line=_line(case),
    )  # fmt: skip
    return Evidence(reached_at=1.0, verdict=_verdict(right.model_copy(update=changed)))


def test_the_right_cause_rank_and_line_are_named() -> None:
    assert judge(_STRIDE.truth, route=Route.SENTINEL, evidence=_red(_STRIDE)).outcome == Outcome.NAMED


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"cause": Cause.SHAPE}, ("cause",)),
        ({"ranks": (1 - _STRIDE.rank if _STRIDE.rank < 2 else 0,)}, ("rank",)),
        ({"ranks": ()}, ("rank",)),
        ({"line": _line(_STRIDE, shifted=1)}, ("line",)),
        ({"line": _line(_STRIDE, file="other.py")}, ("line",)),
        ({"line": None}, ("line",)),
    ],
    ids=["cause", "rank", "nobody", "line", "file", "no line"],
)
def test_a_different_cause_rank_or_line_is_not_named(changed: dict[str, Any], wrong: tuple[str, ...]) -> None:
    judged = judge(_STRIDE.truth, route=Route.SENTINEL, evidence=_red(_STRIDE, **changed))
    assert (judged.outcome, judged.wrong) == (Outcome.DETECTED, wrong)


def test_a_fault_without_a_finding_is_missed() -> None:
    assert judge(_STRIDE.truth, route=Route.SENTINEL, evidence=Evidence(reached_at=1.0)).outcome == Outcome.MISSED


def test_a_job_that_does_not_end_under_the_sentinel_is_a_hang_whatever_it_reported() -> None:
    evidence = _red(_STRIDE).model_copy(update={"is_hang": True})
    assert judge(_STRIDE.truth, route=Route.SENTINEL, evidence=evidence).outcome == Outcome.HANG


def test_a_fault_that_is_never_reached_is_a_defect_of_the_generator() -> None:
    assert judge(_STRIDE.truth, route=Route.SENTINEL, evidence=Evidence()).outcome == Outcome.BROKEN


def test_red_on_a_healthy_case_is_a_false_alarm() -> None:
    assert judge(_HEALTHY.truth, route=Route.SENTINEL, evidence=_red(_STRIDE)).outcome == Outcome.FALSE_ALARM
    assert (
        judge(_HEALTHY.truth, route=Route.DIAGNOSE, evidence=Evidence(diagnose_code=6)).outcome == Outcome.FALSE_ALARM
    )
    assert judge(_HEALTHY.truth, route=Route.SENTINEL, evidence=Evidence()).outcome == Outcome.GREEN
    assert judge(_HEALTHY.truth, route=Route.SENTINEL, evidence=Evidence(codes=(0, 1))).outcome == Outcome.BROKEN


def _branch_verdict(*groups: tuple[int, ...]) -> Verdict:
    divergence = Divergence(
        layer=Layer.GRAPH, cls=DivergenceClass.CONTENT, domain="tp", where="", title="graph differs",
        groups=tuple(RankGroup(ranks=ranks, frame_line=_line(_BRANCH)) for ranks in groups),
        cause=Cause.RANK_BRANCH,
    )  # fmt: skip
    return _verdict(divergences=(divergence,))


def test_of_two_ranks_that_differ_from_the_first_compile_neither_has_to_be_blamed() -> None:
    case = fault_case(7, program="fsdp_tp", operator="branch")
    domain = case.program.domain(case.rank, world_size=4)
    assert set(case.truth.ranks) == {frozenset({case.rank}), frozenset(domain), frozenset()}


def test_of_three_ranks_the_odd_one_has_to_be_blamed() -> None:
    cases = [fault_case(seed, program="hand_mlp", operator="branch") for seed in range(20)]
    case = next(case for case in cases if case.world_size == 3)
    assert case.truth.ranks == (frozenset({case.rank}),)
    others = tuple(rank for rank in range(3) if rank != case.rank)
    named = Evidence(reached_at=1.0, verdict=_branch_verdict(others, (case.rank,)))
    accused = Evidence(reached_at=1.0, verdict=_branch_verdict((others[0], case.rank), (others[1],)))
    assert "rank" not in judge(case.truth, route=Route.CHECK_RANKS, evidence=named).wrong
    assert "rank" in judge(case.truth, route=Route.CHECK_RANKS, evidence=accused).wrong


def test_of_two_ranks_without_a_majority_both_may_be_blamed() -> None:
    case = fault_case(7, program="fsdp_tp", operator="branch")
    first, second = case.program.domain(case.rank, world_size=4)
    for groups in (((first,), (second,)), ((second,), (first,))):
        evidence = Evidence(reached_at=1.0, verdict=_branch_verdict(*groups))
        assert "rank" not in judge(case.truth, route=Route.CHECK_RANKS, evidence=evidence).wrong


def test_a_rank_that_left_no_log_is_named_by_the_id_of_the_check_alone() -> None:
    missing = Check(
        id=CheckId.LOGS_COMPLETE, mode="", status=Status.INFO, expected="", observed="", ranks=(_SILENT.rank,)
    )
    incomplete = Evidence(reached_at=1.0, diagnose_code=6, verdict=_green(missing))
    other = missing.model_copy(update={"id": CheckId.OTHER})
    assert judge(_SILENT.truth, route=Route.DIAGNOSE, evidence=incomplete).outcome == Outcome.NAMED
    assert (
        judge(
            _SILENT.truth, route=Route.DIAGNOSE, evidence=incomplete.model_copy(update={"verdict": _green(other)})
        ).outcome
        == Outcome.MISSED
    )


def test_what_was_not_compiled_must_not_be_red_and_a_hang_must_be_reported() -> None:
    hung = Evidence(reached_at=1.0, diagnose_code=6, is_hang=True)
    assert judge(_SKIPPED.truth, route=Route.DIAGNOSE, evidence=hung).outcome == Outcome.NAMED
    assert (
        judge(_SKIPPED.truth, route=Route.DIAGNOSE, evidence=hung.model_copy(update={"diagnose_code": 0})).outcome
        == Outcome.MISSED
    )
    assert judge(_SKIPPED.truth, route=Route.DIAGNOSE, evidence=_red(_STRIDE)).outcome == Outcome.DETECTED


def test_a_job_that_ended_before_check_ranks_is_not_counted() -> None:
    assert (
        judge(_SKIPPED.truth, route=Route.CHECK_RANKS, evidence=Evidence(reached_at=1.0, is_hang=True)).outcome
        == Outcome.DIED
    )
