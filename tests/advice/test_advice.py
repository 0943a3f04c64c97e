"""Each page of a cause has a program that is red with that cause, and green with what the page says to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.advice.pages import example
from tests.advice.played import LISTED, WATCHED, declared
from tests.forked import run_python
from tpcompile.evidence.judgement.rank_taint import SUGGESTIONS
from tpcompile.evidence.records.causes import ADVICE, Cause

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
PROGRAMS = {program.name: program for program in declared()}
WITHOUT = {
    Cause.AUTOTUNE: "timings decide; tests/faults/planted/compiling.py forces the choice",
    Cause.COMPILER_PASS: "equal ranks share a compiled result; tests/faults/planted/compiling.py has passes",
    Cause.FUSION_REGRESSED: "between two versions of a program: tests/gate/test_fusion.py",
    Cause.COMMUNICATION: "what a rank sees of a peer that left no evidence: tests/gate/test_failure.py",
    Cause.NEVER_ARRIVED: "needs a limit that a slow rank exceeds: tests/faults/planted/process.py sets it to 6 s",
    Cause.STOPPED_RESPONDING: "needs a limit of silence: tests/faults/planted/process.py sets it to 4 s",
    Cause.CACHE_SPLIT: "caches of different age: tests/evidence/logs/test_diagnose.py has the logs of such a job",
    Cause.COMPILE_SKEW: "no verdict of this version names it",
    Cause.UNKNOWN: "what no rule explains",
}
"""Causes whose page has no program -> why."""


@pytest.fixture(scope="module")
def played() -> Any:
    """What became of each program; all of them in one process."""
    ended = run_python(["-m", "tests.advice.played"], timeout_s=280.0)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.key not in LISTED])
def test_the_advice_turns_red_into_green(name: str, played: Any) -> None:
    key, row = PROGRAMS[name].key, played[name]
    as_it_is = row["as it is"]
    assert as_it_is["exit_code"] != 0
    assert as_it_is["cause"] == key or key in as_it_is["taints"], as_it_is["says"]
    for followed in row["followed"].values():
        assert (followed["exit_code"], followed["taints"]) == (0, []), followed["says"]


@pytest.mark.parametrize("cause", sorted(LISTED))
def test_what_is_no_fault_is_listed_and_gone_with_what_the_page_says(cause: Cause, played: Any) -> None:
    row = played[cause.slug]
    assert row["as it is"]["exit_code"] == 0 and cause in row["as it is"]["listed"]
    assert [cause in followed["listed"] for followed in row["followed"].values()] == [False]


@pytest.mark.parametrize("cause", Cause)
def test_a_page_has_a_program_and_a_fix_for_each_sentence_of_advice_or_a_reason(cause: Cause) -> None:
    shown = example(cause)
    if shown is None:
        assert cause in WITHOUT and not ADVICE.get(cause)
        return
    assert cause not in WITHOUT
    says = [fix.says for fix in shown.fixes]
    assert says == list(ADVICE.get(cause, says)) != []
    assert len([line for line in shown.program.splitlines() if line]) <= 20
    assert cause in WATCHED or cause.slug in PROGRAMS


def test_a_sentence_without_a_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVICE, Cause.SHAPE, (*ADVICE[Cause.SHAPE], "Use one length only."))
    with pytest.raises(AssertionError, match="one length"):
        test_a_page_has_a_program_and_a_fix_for_each_sentence_of_advice_or_a_reason(Cause.SHAPE)


def test_what_is_suggested_for_values_that_depend_on_the_rank_has_programs() -> None:
    followed = {text for program in PROGRAMS.values() if program.key in SUGGESTIONS for text in program.followed}
    assert followed == set(SUGGESTIONS.values())
