"""The declared cases: each can be run and judged, and stands for something; wrong declarations are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.case import CASES, Planted, chosen, fault, load
from tests.faults.drawn.operators import ALL as OPERATORS
from tpcompile.errors import ConfigError
from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.faults.fault import injects

_GREEN_OR_UNKNOWN = {
    Cause.CACHE_SPLIT, Cause.COMPILE_SKEW, Cause.COMPILE_ORDER, Cause.RANK_PARAMETRIC, Cause.UNKNOWN,
}  # fmt: skip
_NAMES = {cause.name.lower() for cause in Cause}
_PROCESS = {
    Cause.KILLED, Cause.NEVER_ARRIVED, Cause.RAISED, Cause.STOPPED_RESPONDING, Cause.NOTHING_COMPILED,
}  # fmt: skip
_BEYOND_RANKS = {Cause.FUSION_REGRESSED}
"""Between commits: tests/gate/test_fusion.py."""
_EXECUTED = {Cause.PARTED}
"""What executed lines show, before the cause of a case: tests/sentinel/test_executed.py."""
_CONSEQUENCES = {Cause.COMMUNICATION}
"""What a rank sees of a fault of a different one: tests/gate/test_failure.py."""
load("planted", "healthy")
ALL = {case.name: case for case in chosen([])}
_CASES = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


@_CASES
def test_a_case_says_what_it_plants_and_cites_a_public_thread(case: Planted) -> None:
    assert case.what and case.threads
    assert all(re.match(r"[\w./-]+#\d+", thread) and ": " in thread for thread in case.threads)


@_CASES
def test_a_fault_blames_ranks_of_the_job_and_a_healthy_program_none(case: Planted) -> None:
    assert bool(case.ranks) == (case.cause is not None)
    assert all(rank < case.world_size for rank in case.ranks)
    assert case.step < case.num_steps
    assert bool(case.marker) <= (case.cause is not None)


def test_no_marker_is_left_without_a_case() -> None:
    for source in {case.source for case in ALL.values()}:
        markers = set(re.findall(r"(?<!\")# (?:fault|blamed): .*$", source.read_text(), re.MULTILINE))
        assert markers <= {case.marker for case in ALL.values() if case.source == source}, source


def test_the_cases_are_many_and_cover_every_cause_a_program_can_have() -> None:
    assert len([case for case in ALL.values() if case.cause]) >= 40
    named = {case.cause for case in ALL.values()}
    generated = {Cause[name.upper()] for operator in OPERATORS.values() for name in operator.causes & _NAMES}
    assert set(Cause) - named - generated <= _GREEN_OR_UNKNOWN | _PROCESS | _BEYOND_RANKS | _CONSEQUENCES | _EXECUTED


def test_names_are_looked_up_and_unknown_ones_refused() -> None:
    assert len(chosen([])) == 94
    assert chosen(["stride", "stack_llama", "stride"]) == [CASES["stride"], CASES["stack_llama"]]  # each once
    with pytest.raises(ConfigError, match="unknown case 'nope'"):
        chosen(["nope"])


def test_a_second_case_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two cases .*'stride'$"):
        fault(Cause.STRIDE, name="stride")(_program)
    assert CASES["stride"].program is not _program


def test_a_second_injected_fault_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two faults .*'killed'$"):
        injects("phase", name="killed")(_program)


def test_a_program_without_the_line_that_its_case_blames_is_refused() -> None:
    marker = " ".join(("# fault:", "a typo"))
    with pytest.raises(ValueError, match=rf"'_program': .*test_cases\.py .*'{marker}'"):
        fault(Cause.STRIDE, marker=marker)(_program)
    assert "_program" not in CASES


def _program(context: Any) -> None:
    """A program without a marked line."""


def test_a_marker_of_a_different_case_is_not_taken_for_ones_own() -> None:
    assert replace(CASES["stride"], marker="# blamed: input").blamed_lines() == []
