"""Targets that are invalid, end their process, close what the gate uses, or write files that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gate.runs import AOT, GateRun, run_gate, run_many
from tpcompile import target as targets
from tpcompile.config import TargetConfig, load_target
from tpcompile.errors import ExitCode
from tpcompile.target import Target, TargetError

HOSTILE = "tests.gate.hostile"
GREEN = ("prints_much", "prints_what_is_no_text", "goes_elsewhere", "closes_its_output", "leaves_a_child", "counts")
RED = {
    "exits": (ExitCode.FAIL, "SystemExit in phase target/build: 0, expected no exception"),
    "raises_oddly": (ExitCode.FAIL, "Odd in phase target/build: strange, expected no exception"),
    "destroys": (ExitCode.USAGE, "hostile:destroys destroyed the process group; the gate needs it"),
}
pytestmark = pytest.mark.timeout(300)


def config(function: str = "build") -> TargetConfig:
    return load_target(f"{HOSTILE}:{function}", device="cpu")


@pytest.fixture(scope="module")
def green(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs = {name: {"target": f"{HOSTILE}:{name}", "overrides": [*AOT], "device": "cpu"} for name in GREEN}
    return run_many(tmp_path_factory.mktemp("green"), jobs)


@pytest.mark.parametrize("name", GREEN)
def test_what_does_not_concern_the_gate_does_not_disturb_it(name: str, green: dict[str, GateRun]) -> None:
    assert green[name].exit_code == ExitCode.PASS, green[name].judged.summary


@pytest.mark.parametrize("name", RED)
def test_a_target_that_ends_or_breaks_the_job_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    run = run_gate(tmp_path / "run", "--target", f"{HOSTILE}:{name}", "--set", AOT[0])
    code, text = RED[name]
    assert (run.judged.exit_code, text in run.judged.summary) == (code, True), run.judged.summary
    assert run.exit_code != 0 and run.left_running == ()
    if "phase" in text:
        (check,) = run.failed().values()
        assert check.line is not None and check.line.file.endswith("hostile.py")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("takes_two", r"it is called as takes_two\(ctx\): missing a required argument: 'other'"),
        ("takes_none", r"it is called as takes_none\(ctx\): too many positional arguments"),
        ("NUMBER", "has no function NUMBER"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused(function: str, text: str) -> None:
    with pytest.raises(TargetError, match=f"^--target {HOSTILE}:{function}.*{text}"):
        targets.find(config(function))
    assert callable(targets.find(config("counts")))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"program": "model"}, "program is str; it must be a module or a function"),
        ({"inputs": None}, "inputs is NoneType; it must be a tensor, a tuple of arguments or a dict"),
        ({"inputs": "tokens"}, "inputs is str; it must be a tensor"),
        ({"resized": 3}, "resized is int; it must be a tensor"),
        ({"step": 3}, "step is int; it must be a function"),
        ({"reference": torch.relu}, "reference is builtin_function_or_method; it must be a module, or None"),
        ({"num_graphs": "one"}, "num_graphs is str; it must be a number, or None"),
        ({"mesh": "tp"}, "mesh is str; it must be a DeviceMesh, or None"),
        ({"axis": None}, "axis is NoneType; it must be the name of an axis"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    fields: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets.dist, "is_initialized", lambda: True)
    given: dict[str, Any] = {"program": nn.ReLU(), "inputs": torch.ones(2)}
    assert targets.target_of(config(), Target(**given)).num_graphs == 1
    with pytest.raises(TargetError, match=f"--target {HOSTILE}:build: {text}"):
        targets.target_of(config(), Target(**given | fields))
