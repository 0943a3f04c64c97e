"""Train steps with optimizers: what is wrong after them is named by parameter, and begins with an op of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gate.runs import GateRun, run_many
from tpcompile.evidence.records import Check, CheckId, MistakeKind
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.measurements import GateFacts

PROGRAMS = Path(__file__).with_name("own_steps.py")
WRONG = {
    "replicated_scale": ("gradient of scale", MistakeKind.GRADIENT_NOT_SUMMED),
    "clipping": ("gradient of norm", MistakeKind.NOT_SUMMED),
    "accumulated": ("gradient of norm", MistakeKind.ONE_OF_TP),
    "learning_rate": ("weight of norm", MistakeKind.MULTIPLE),
    "stale": ("weight of norm", MistakeKind.LATE),
    "attention": ("gradient of table", MistakeKind.GRADIENT_NOT_SUMMED),
    "plan": ("momentum_buffer of norm.weight", MistakeKind.UNKNOWN),
    "half": ("gradient of scale", MistakeKind.GRADIENT_NOT_SUMMED),
}
"""Program -> the first value that is wrong, and the kind of the mistake."""
BY_HAND = ("learning_rate", "stale")
"""Without an optimizer."""
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs = {}
    for name in WRONG:
        for wrong in ("wrong", "right"):
            settings = ["compile.backend=eager", *(["wrong=yes"] if wrong == "wrong" else [])]
            jobs[f"{name}-{wrong}"] = {
                "target": f"tests.gate.own_steps:{name}",
                "overrides": settings,
                "device": "cpu",
            }
    return run_many(tmp_path_factory.mktemp("steps"), jobs)


MARKS = {"half": "replicated_scale"}
"""Programs whose fault is that of a different one."""


def line_of(mark: str) -> int:
    lines = PROGRAMS.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def forward_check(run: GateRun) -> Check:
    (check,) = [check for check in run.judged.checks if check.id == CheckId.FORWARD]
    return check


def facts_of(run: GateRun) -> list[GateFacts]:
    return [GateFacts.model_validate(record.facts) for record in RunDir(run.run_dir).read_records()]


@pytest.mark.parametrize("name", WRONG)
def test_a_right_train_step_passes_and_its_weights_were_compared(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-right"]
    assert run.exit_code == 0, run.judged.summary
    for facts in facts_of(run):
        assert facts.left_out == ()
        compared = {error.name for error in facts.errors_in("target", "forward")}
        weights = {name for name in compared if name.startswith("weight of ")}
        assert len(weights) >= 3
        assert {f"gradient of {name.removeprefix('weight of ')}" for name in weights} <= compared or name in BY_HAND


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_train_step_is_named_with_its_line(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-wrong"]
    assert run.exit_code == 1
    check = forward_check(run)
    assert check.line is not None, check
    assert (Path(check.line.file).name, check.line.line) == (PROGRAMS.name, line_of(MARKS.get(name, name))), check


@pytest.mark.parametrize("name", WRONG)
def test_the_first_wrong_value_has_its_parameters_name(runs: dict[str, GateRun], name: str) -> None:
    value, kind = WRONG[name]
    facts = facts_of(runs[f"{name}-wrong"])
    for known in facts:
        bad = [error.name for error in known.errors_in("target", "forward") if error.badness > 2.5]
        assert bad[0] == value
    assert {one.first_wrong_op.kind for one in facts if one.first_wrong_op} == {kind}
