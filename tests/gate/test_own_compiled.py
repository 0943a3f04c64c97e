"""Targets that are right in eager and wrong compiled: the layer, the op with its line, and a file that fails alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate.runs import GateRun, run_gate, run_many
from tpcompile.evidence.records import CheckId, CompilerLayer, Status, WrongCompiled
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.measurements import GateFacts

PROGRAMS = Path(__file__).with_name("own_compiled.py")
TARGETS = "tests.gate.own_compiled"
LAYERS = {
    "post_grad": CompilerLayer.POST_GRAD,
    "joint": CompilerLayer.JOINT,
    "decomposition": CompilerLayer.DECOMPOSITION,
    "lowering": CompilerLayer.LOWERING,
    "backend": CompilerLayer.BACKEND,
}
OPS = {
    "post_grad": "aten.tanh",
    "joint": "torch.relu",
    "decomposition": "torch.nn.functional.silu",
    "lowering": "aten.sin",
    "backend": "Tensor.clamp_",
}
RIGHT = (*LAYERS, "bf16", "dropout")
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    """The right ones in one job; each wrong one alone, since what it adds to the compiler stays in the process."""
    folder = tmp_path_factory.mktemp("compiled")
    jobs = {f"{name}-no": {"target": f"{TARGETS}:{name}", "device": "cpu"} for name in RIGHT}
    found = run_many(folder, jobs)
    for name in LAYERS:
        found[f"{name}-yes"] = run_gate(
            folder / f"{name}-yes", "--target", f"{TARGETS}:{name}", "--set", "wrong=yes", "--device", "cpu"
        )
    return found


def findings(run: GateRun) -> list[WrongCompiled]:
    facts = [GateFacts.model_validate(record.facts) for record in RunDir(run.run_dir).read_records()]
    return [one.wrong_compiled for one in facts if one.wrong_compiled]


def line_of(mark: str) -> int:
    lines = PROGRAMS.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_the_op_and_its_line_are_named(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-yes"]
    assert run.exit_code == 1
    check = run.failed()[CheckId.COMPILER]
    assert check.line is not None
    assert (Path(check.line.file).name, check.line.line) == (PROGRAMS.name, line_of(name))
    assert {(one.layer, one.op) for one in findings(run)} == {(LAYERS[name], OPS[name])}
    assert check.ranks == (0, 1)
    own = [check.id for check in run.failed().values() if not check.is_consequence]
    assert own == [CheckId.COMPILER]


@pytest.mark.parametrize("name", LAYERS)
def test_a_file_without_tpcompile_fails_alone(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-yes"]
    assert {one.fails_alone for one in findings(run)} == {True}
    file = run.run_dir / "repro.py"
    assert list(run.run_dir.glob("repro*.py")) == [file], "ranks that found the same op need one file"
    assert "tpcompile" not in file.read_text().partition("INPUTS")[2]
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "compiled:" in ended.stdout


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_twin_does_not_alarm(runs: dict[str, GateRun], name: str) -> None:
    run = runs[f"{name}-no"]
    assert run.exit_code == 0, run.judged.summary


def test_random_numbers_of_compiled_code_are_no_error(runs: dict[str, GateRun]) -> None:
    run = runs["dropout-no"]
    (check,) = [check for check in run.judged.checks if check.id == CheckId.COMPILER]
    assert check.status == Status.INFO
    assert {one.layer for one in findings(run)} == {CompilerLayer.RANDOM}
    assert re.search("; numbers: .*random numbers", run.judged.summary)


def test_a_fault_of_one_rank_is_found_on_that_rank(tmp_path: Path) -> None:
    run = run_gate(
        tmp_path / "run", "--target", f"{TARGETS}:lowering", "--set", "wrong=yes", "--set", "only_rank=1"
    )  # fmt: skip
    check = run.failed()[CheckId.COMPILER]
    assert check.ranks == (1,)
    assert (run.run_dir / "repro.rank1.py").exists()


@pytest.fixture(scope="module")
def other_ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WrongCompiled]:
    """Programs that do something else where they are compiled, and a backend that takes the collectives out."""
    folder = tmp_path_factory.mktemp("other")
    names = ("branch", "skip", "sums")
    runs = {name: run_gate(folder / name, "--target", f"{TARGETS}:{name}", "--device", "cpu") for name in names}
    return {name: findings(run)[0] for name, run in runs.items()}


@pytest.mark.parametrize(("name", "mark"), [("branch", "traced"), ("skip", "skipped")])
def test_a_branch_on_what_is_compiled_is_named_by_the_line_that_only_one_of_both_runs(
    other_ways: dict[str, WrongCompiled], name: str, mark: str
) -> None:
    found = other_ways[name]
    assert found.layer is CompilerLayer.DYNAMO and found.line is not None
    assert (found.line.file, found.line.line) == (str(PROGRAMS), line_of(mark))


def test_a_backend_that_takes_collectives_out_is_the_layer(other_ways: dict[str, WrongCompiled]) -> None:
    found = other_ways["sums"]
    assert (found.layer, found.backend) == (CompilerLayer.BACKEND, "AotAutograd")
