"""The plan of generated faults: deterministic, every operator changes its program, truths point at real lines."""

from __future__ import annotations

import ast
from itertools import pairwise

import pytest

from scripts.generated_faults import main
from tests.faults.drawn.operators import ALL, FAULTS
from tests.faults.drawn.operators.operator import Operator
from tests.faults.drawn.plan import Drawn, fault_case, healthy_case, pairs
from tests.faults.drawn.programs_list import PROGRAMS
from tests.faults.drawn.template import PROGRAMS as FOLDER
from tests.faults.drawn.template import Template


def _case_of(name: str, seed: int = 5) -> Drawn:
    make = healthy_case if ALL[name].is_healthy else fault_case
    return make(seed, operator=name)


def test_there_are_at_least_35_kinds_of_faults_and_15_programs() -> None:
    assert len(FAULTS) >= 35
    assert len(PROGRAMS) >= 15
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == set(PROGRAMS)


def test_every_operator_fits_a_program_and_every_program_takes_twenty_operators() -> None:
    fitting = [*pairs("fault"), *pairs("healthy")]
    assert {operator for _, operator in fitting} == set(ALL)
    for name in PROGRAMS:
        assert sum(program == name for program, _ in fitting) >= 20, name


def test_a_seed_draws_the_same_case_again() -> None:
    for seed in range(30):
        assert fault_case(seed) == fault_case(seed)
        assert healthy_case(seed) == healthy_case(seed)


@pytest.mark.parametrize("given", [{}, {"operator": "branch"}, {"program": "regional", "operator": "branch"}])
def test_the_command_that_runs_a_case_again_draws_the_same(given: dict[str, str]) -> None:
    """An operator that is given is not drawn, and the rest differs."""
    case = fault_case(1006, **given)
    words = case.replay.split()
    options = dict(pairwise(words))
    named = {name: options[f"--{name}"] for name in ("program", "operator") if f"--{name}" in options}
    assert fault_case(int(options["--seeds"]), **named) == case
    assert (options["--kind"], "--held-out" in words, set(named)) == ("faults", True, set(given))


def test_seeds_draw_different_operators_programs_ranks_and_lines() -> None:
    cases = [fault_case(seed) for seed in range(100)]
    assert len({case.operator.name for case in cases}) > 30
    assert len({case.program.name for case in cases}) > 12
    assert {case.rank for case in cases} >= {0, 1, 2, 3}
    branches = [fault_case(seed, program="hand_mlp", operator="branch") for seed in range(20)]
    assert len({case.truth.lines for case in branches}) >= 3


@pytest.mark.parametrize("name", ALL)
def test_the_mutated_program_parses_and_differs_from_the_clean_one(name: str) -> None:
    for seed in range(4):
        case = _case_of(name, seed)
        clean = Template.read(case.program.name)
        ast.parse(case.source.text)
        added = len(case.source.text.splitlines()) - len(clean.lines)
        assert added > 0
        assert "$" not in case.source.text


@pytest.mark.parametrize("operator", FAULTS, ids=lambda operator: operator.name)
def test_the_line_to_blame_is_in_the_program(operator: Operator) -> None:
    case = _case_of(operator.name)
    if not case.operator.has_line:
        assert case.truth.lines is None
        return
    assert case.truth.lines
    lines = case.source.text.splitlines()
    assert any(lines[number - 1].endswith("# fault") for number in case.truth.lines)


def test_seeds_that_are_held_out_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--seeds", "999-1000"])
    assert stopped.value.code == 2
    assert "held out" in capsys.readouterr().err
