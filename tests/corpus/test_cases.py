"""The corpus itself: every case can be run and judged, and stands for something."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tpcompile.corpus.case import Case
from tpcompile.corpus.cases import ALL, chosen, find
from tpcompile.corpus.generated.operators import ALL as OPERATORS
from tpcompile.errors import ConfigError
from tpcompile.evidence.records.causes import Cause

_GREEN_OR_UNKNOWN = {
    Cause.CACHE_SPLIT, Cause.COMPILE_SKEW, Cause.COMPILE_ORDER, Cause.RANK_PARAMETRIC, Cause.UNKNOWN,
}  # fmt: skip
_NAMES = {cause.name.lower() for cause in Cause}
_PROCESS = {
    Cause.KILLED, Cause.NEVER_ARRIVED, Cause.RAISED, Cause.STOPPED_RESPONDING, Cause.NOTHING_COMPILED,
}  # fmt: skip
_CASES = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


@_CASES
def test_a_case_has_its_program_once(case: Case) -> None:
    functions = [n.name for n in ast.parse(case.source.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert functions.count(case.program.partition(":")[2]) == 1


@_CASES
def test_the_marker_of_a_case_is_on_a_line(case: Case) -> None:
    assert bool(case.blamed_lines()) == bool(case.marker)


@_CASES
def test_a_case_says_what_it_plants_and_cites_a_public_thread(case: Case) -> None:
    assert case.what and case.threads
    assert all(re.match(r"[\w./-]+#\d+", thread) and ": " in thread for thread in case.threads)


@_CASES
def test_a_fault_blames_ranks_of_the_job_and_a_healthy_program_none(case: Case) -> None:
    assert bool(case.ranks) == (case.cause is not None)
    assert all(rank < case.world_size for rank in case.ranks)
    assert case.step < case.num_steps
    assert bool(case.marker) <= (case.cause is not None)


def test_no_marker_is_left_without_a_case() -> None:
    for source in {case.source for case in ALL.values()}:
        markers = set(re.findall(r"# (?:fault|blamed): .*$", source.read_text(), re.MULTILINE))
        assert markers <= {case.marker for case in ALL.values() if case.source == source}, source


def test_the_corpus_is_large_and_covers_every_cause_a_program_can_have() -> None:
    assert len([case for case in ALL.values() if case.cause]) >= 40
    named = {case.cause for case in ALL.values()}
    generated = {Cause[name.upper()] for operator in OPERATORS.values() for name in operator.causes & _NAMES}
    assert set(Cause) - named - generated <= _GREEN_OR_UNKNOWN | _PROCESS


def test_names_are_looked_up_and_unknown_ones_refused() -> None:
    assert chosen([]) == list(ALL.values())
    assert chosen(["stride"]) == [find("stride")]
    with pytest.raises(ConfigError, match="unknown case 'nope'"):
        find("nope")


def test_a_marker_of_another_case_is_not_taken_for_ones_own() -> None:
    case = find("stride").model_copy(update={"marker": "# blamed: input"})
    assert case.blamed_lines() == []


def test_the_corpus_is_read_without_torch() -> None:
    code = "import sys, tpcompile.corpus.sweep, tpcompile.corpus.matrix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
