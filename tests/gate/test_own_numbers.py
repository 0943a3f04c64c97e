"""Targets whose ranks agree on wrong numbers: the op, its line, the kind of mistake and the name of the value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gate.runs import GateRun, run_many
from tpcompile.evidence.records import Check, CheckId, MistakeKind
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.measurements import GateFacts

PROGRAMS = Path(__file__).with_name("own_numbers.py")
KINDS = {
    "gate_up": MistakeKind.CUT_AS_ONE,
    "gradient_norm": MistakeKind.PER_RANK,
    "norm_of_a_plan": MistakeKind.PER_RANK,
    "adapter": MistakeKind.OTHER_NUMBER,
    "global_group": MistakeKind.OTHER_NUMBER,
    "named_group": MistakeKind.OTHER_NUMBER,
    "experts": MistakeKind.OTHER_PART,
    "heads_in_turn": MistakeKind.OTHER_PART,
    "flat_table": MistakeKind.OTHER_PART,
    "two_axes": MistakeKind.WRONG_GROUP,
    "own_mesh": MistakeKind.OTHER_NUMBER,
    "counted": MistakeKind.TP_TIMES,
    "statistics": MistakeKind.OTHER_NUMBER,
    "flat_parts": MistakeKind.MULTIPLE,
    "by_hand": MistakeKind.MULTIPLE,
}
MARKS = {"global_group": "adapter", "own_mesh": "adapter"}
"""Programs whose line is that of a different one."""
ON_FOUR = ("two_axes", "own_mesh", "counted")
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs = {}
    for name in KINDS:
        for wrong in ("yes", "no"):
            settings = ["compile.backend=eager", f"wrong={wrong}"]
            job = {"target": f"tests.gate.own_numbers:{name}", "overrides": settings, "device": "cpu"}
            jobs[f"{name}-{wrong}"] = job
    alone = ["compile.backend=eager", "wrong=yes", "ranks=two"]
    jobs["adapter of two"] = {"target": "tests.gate.own_numbers:adapter", "overrides": alone, "device": "cpu"}
    on_four = {name: job for name, job in jobs.items() if name.startswith(ON_FOUR)}
    on_two = {name: job for name, job in jobs.items() if name not in on_four}
    four = run_many(tmp_path_factory.mktemp("on_four"), on_four, nproc=4)
    return four | run_many(tmp_path_factory.mktemp("numbers"), on_two)


def line_of(mark: str) -> int:
    lines = PROGRAMS.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def forward_check(run: GateRun) -> Check:
    (check,) = [check for check in run.judged.checks if check.id == CheckId.FORWARD]
    return check


@pytest.mark.parametrize("name", KINDS)
def test_the_op_and_the_kind_of_a_mistake_are_named(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-yes"]
    assert run.exit_code == 1
    (check,) = run.failed().values()
    assert check.line is not None
    assert (Path(check.line.file).name, check.line.line) == (PROGRAMS.name, line_of(MARKS.get(name, name)))
    lead = run.judged.lead
    assert lead is not None
    assert (lead.line, lead.parted) == (check.line, None)  # the search builds and runs the program otherwise
    facts = [GateFacts.model_validate(record.facts) for record in RunDir(run.run_dir).read_records()]
    found = [one.first_wrong_op for one in facts if one.first_wrong_op]
    assert {op.kind for op in found if op.line == check.line} == {
        KINDS[name]
    }  # on a rank that is right: where it meets


@pytest.mark.parametrize("name", KINDS)
def test_a_program_with_right_numbers_passes(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-no"]
    assert run.exit_code == 0, run.judged.summary


@pytest.mark.parametrize("name", ["gradient_norm", "norm_of_a_plan"])
def test_a_value_has_the_name_that_the_step_gave_it(runs: dict[str, GateRun], name: str) -> None:
    observed = forward_check(runs[f"{name}-yes"]).observed
    assert re.match(r"gradient norm: 1\.00\d+ times .*; .* aten\.", observed), observed
    assert "a replicated gradient" in observed


def test_state_that_is_a_flat_part_is_compared(runs: dict[str, GateRun]) -> None:
    assert re.match(r"momentum_buffer .*weight: 0\.75 times", forward_check(runs["flat_parts-yes"]).observed)


def test_the_weight_that_was_cut_as_one_is_named(runs: dict[str, GateRun]) -> None:
    assert re.search(r"gate_up\.weight .*one matrix", forward_check(runs["gate_up-yes"]).observed)


def test_without_a_program_for_one_rank_the_search_goes_on(runs: dict[str, GateRun]) -> None:
    """The product before the scale has no equal in the reference: with it halved the run is right as well."""
    check = forward_check(runs["adapter of two"])
    assert check.line is not None
    assert check.line.code.startswith("delta = comm.all_reduce(")
