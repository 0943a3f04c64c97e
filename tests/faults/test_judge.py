"""The judge of cases: every outcome, and what makes a red verdict wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.case import CASES, Planted
from tests.faults.judge import (
    Evidence,
    Outcome,
    compile_intervals,
    covered_s,
    first_finding,
    judge,
    time_to_verdict,
)
from tpcompile.evidence.records import (
    Check,
    Divergence,
    DivergenceClass,
    Layer,
    RankGroup,
    Status,
    UserLine,
    Verdict,
    value_item,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.timeline import TimelineEvent

CASE = CASES.find("attribute_constant")
HEALTHY = CASES.find("clean")


def blamed(case: Planted = CASE, *, by: int = 0) -> UserLine:
    """The line that must be blamed, or one `by` lines further down."""
    return UserLine(file=f"/elsewhere/tests/faults/planted/{case.source.name}", line=case.blamed_lines()[0] + by)


def divergence(**changes: Any) -> Divergence:
    groups = (RankGroup(ranks=(0,)), RankGroup(ranks=(1,), item=value_item("item", "%1", line=blamed())))
    right: dict[str, Any] = {
        "layer": Layer.GRAPH, "cls": DivergenceClass.CONTENT, "domain": "world 0-1", "where": "", "groups": groups,
        "title": "graph differs", "cause": Cause.PYTHON_VALUE,
    }  # fmt: skip
    return Divergence(**(right | changes))


def verdict(*divergences: Divergence, checks: tuple[Check, ...] = ()) -> Verdict:
    red = any(d.is_red for d in divergences) or any(c.status == Status.FAIL for c in checks)
    return Verdict(
        status=Status.FAIL if red else Status.PASS, exit_code=int(red), world_size=2, summary="", checks=checks,
        divergences=divergences,
    )  # fmt: skip


def evidence(said: Verdict | None, **changes: Any) -> Evidence:
    left: dict[str, Any] = {"verdict": said, "verdict_at": 11.0 if said else None, "reached_at": 10.0, "codes": (1,)}
    return Evidence(**(left | changes))


def test_a_fault_with_the_right_cause_ranks_and_line_is_named() -> None:
    assert judge(CASE.truth, evidence(verdict(divergence()))).outcome == Outcome.NAMED
    assert time_to_verdict(evidence(verdict(divergence()))) == (1.0, 0.0)


def test_a_different_cause_is_only_detected() -> None:
    result = judge(CASE.truth, evidence(verdict(divergence(cause=Cause.RANK_BRANCH))))
    assert (result.outcome, result.wrong) == (Outcome.DETECTED, ("cause",))


def test_a_different_rank_is_only_detected() -> None:
    groups = (RankGroup(ranks=(1,)), RankGroup(ranks=(0,), item=value_item("item", "%1", line=blamed())))
    result = judge(CASE.truth, evidence(verdict(divergence(groups=groups))))
    assert (result.outcome, result.wrong) == (Outcome.DETECTED, ("rank",))


def test_where_a_planted_fault_is_on_one_rank_a_split_without_a_majority_does_not_count() -> None:
    both = replace(CASE, named=(0, 1))
    assert judge(both.truth, evidence(verdict(divergence()))).wrong == ("rank",)
    undecided = replace(both.truth, is_majority_needed=False)
    assert judge(undecided, evidence(verdict(divergence()))).outcome == Outcome.NAMED


@pytest.mark.parametrize("line", [blamed(by=1), UserLine(file="/x/other.py", line=blamed().line), None])
def test_a_different_line_is_only_detected(line: UserLine | None) -> None:
    groups = (RankGroup(ranks=(0,)), RankGroup(ranks=(1,), item=value_item("item", "%1", line=line)))
    result = judge(CASE.truth, evidence(verdict(divergence(groups=groups))))
    assert (result.outcome, result.wrong) == (Outcome.DETECTED, ("line",))


@pytest.mark.parametrize("said", [None, verdict(), verdict(divergence(cls=DivergenceClass.LABEL))])
def test_a_fault_without_a_red_verdict_is_missed(said: Verdict | None) -> None:
    assert judge(CASE.truth, evidence(said, codes=(0,))).outcome == Outcome.MISSED


def test_a_case_that_does_not_end_is_a_hang_even_with_a_right_verdict() -> None:
    hung = evidence(verdict(divergence()), is_hang=True)
    result = judge(CASE.truth, hung)
    assert (result.outcome, time_to_verdict(hung)) == (Outcome.HANG, (None, 0.0))
    assert result.found is not None and result.found.text == "graph differs"


def test_a_fault_that_no_rank_reached_is_broken_whatever_was_reported() -> None:
    assert judge(CASE.truth, evidence(verdict(divergence()), reached_at=None)).outcome == Outcome.BROKEN


def test_a_healthy_program_that_ends_well_is_green() -> None:
    assert judge(HEALTHY.truth, evidence(None, reached_at=None, codes=(0,))).outcome == Outcome.GREEN


def test_a_healthy_program_called_red_is_a_false_alarm() -> None:
    assert judge(HEALTHY.truth, evidence(verdict(divergence()), reached_at=None)).outcome == Outcome.FALSE_ALARM


def test_a_healthy_program_that_raises_is_broken() -> None:
    assert judge(HEALTHY.truth, evidence(None, reached_at=None, codes=(1,))).outcome == Outcome.BROKEN


def test_what_was_found_wrong_or_not_at_all_is_not_right() -> None:
    wrong = {Outcome.DETECTED, Outcome.MISSED, Outcome.HANG, Outcome.FALSE_ALARM, Outcome.BROKEN}
    assert {outcome for outcome in Outcome if not outcome.is_right} == wrong


def test_without_a_majority_every_rank_of_the_difference_may_be_odd() -> None:
    even = first_finding(verdict(divergence()))
    groups = (RankGroup(ranks=(0, 2)), RankGroup(ranks=(1,)))
    odd = first_finding(verdict(divergence(groups=groups)))
    assert even is not None and (even.ranks, even.without_majority) == ((1,), (0, 1))
    assert odd is not None and (odd.ranks, odd.without_majority) == ((1,), ())


def test_an_environment_that_differs_is_named_after_the_program() -> None:
    environment = divergence(layer=Layer.ENVIRONMENT, cause=Cause.ENVIRONMENT, title="environment differs")
    found = first_finding(verdict(environment, divergence()))
    assert found is not None and found.cause == Cause.PYTHON_VALUE
    alone = first_finding(verdict(environment))
    assert alone is not None and alone.cause == Cause.ENVIRONMENT


def test_a_check_with_a_cause_is_the_finding_where_no_program_differs() -> None:
    shared: dict[str, Any] = {"mode": "", "status": Status.FAIL, "expected": "", "observed": "gone"}
    checks = (
        Check(name="together", **shared),
        Check(name="alive", ranks=(1,), cause=Cause.KILLED, line=blamed(), **shared),
    )
    found = first_finding(verdict(checks=checks))
    assert found is not None and (found.cause, found.ranks, found.line) == (Cause.KILLED, (1,), blamed())


def test_compile_time_of_the_slowest_rank_is_not_counted() -> None:
    left = evidence(verdict(), verdict_at=20.0, compiling=(((11.0, 12.0),), ((9.0, 14.0), (13.0, 15.0))))
    assert time_to_verdict(left) == (5.0, 5.0)


def test_there_is_no_time_without_a_verdict_or_without_a_fault() -> None:
    assert time_to_verdict(evidence(None)) == (None, 0.0)
    assert time_to_verdict(evidence(verdict(), reached_at=None)) == (None, 0.0)


def test_overlapping_compiles_count_once() -> None:
    assert covered_s([(0.0, 4.0), (2.0, 5.0), (8.0, 30.0)], 1.0, 10.0) == 6.0


def test_a_compile_that_never_ended_lasts_until_the_verdict() -> None:
    starts, ends = TimelineEvent.COMPILE_STARTS, TimelineEvent.COMPILE_ENDS
    timeline = [(1.0, starts, "0/0"), (2.0, ends, "0/0"), (3.0, starts, "0/1"), (4.0, TimelineEvent.ALARM, "")]
    assert compile_intervals(timeline, end=5.0) == ((1.0, 2.0), (3.0, 5.0))
