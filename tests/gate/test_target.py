"""`--target MODULE:FUNCTION`: programs of users through the gate; faults in them are named with the user's line."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forked import PYTHONPATH, ROOT, Ended, run_python, torchrun
from tests.gate.runs import AOT, REPRO, GateRun, by_id, compare, run_gate, run_many
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Check, CheckId, Layer, Status
from tpcompile.evidence.rundir import RunDir
from tpcompile.recording.flow import IS_POSSIBLE
from tpcompile.report import github, junit

OWN = Path(__file__).with_name("own.py")
LLAMA = Path(__file__).with_name("own_llama.py")
IN_JOB = Path(__file__).with_name("in_job.py")
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

ENDINGS = {
    "returns nothing": (ExitCode.USAGE, "returned NoneType; return a tpcompile.Target or (program, inputs)"),
    "has no such axis": (ExitCode.USAGE, "the mesh has no axis 'model'; it has tp"),
    "allows what cannot be": (ExitCode.USAGE, "gate.allow.0.layer='graphs': Input should be 'environment'"),
    "compiles nothing": (ExitCode.NOTHING_COMPILED, "nothing was compiled"),
    "NaN": (ExitCode.FAIL, "forward right: worst not finite"),
}
"""What leaves all ranks alive."""
LAST = {
    "raises": (ExitCode.FAIL, "ValueError in phase target/build: no such checkpoint"),
    "raises on one": (ExitCode.FAIL, "ValueError in phase target/build: no such checkpoint"),
    "never returns": (ExitCode.TIMEOUT, "phase target/build did not end in time"),
    "never ends": (ExitCode.TIMEOUT, "phase target/first did not end in time"),
}
"""What ends the ranks."""
NOWHERE = {
    "nowhere:build": "there is no module tests.gate.nowhere here",
    "own:nothing": "tests.gate.own has no function nothing",
}
ALIVE = ("constant", "break", "dtype")
"""Faults that leave all ranks alive."""
SHARED = [
    *(f"own:functional fault={fault}" for fault in ("", *ALIVE, "layout", "wrong")),
    *(f"own:planned fault={fault}" for fault in ("", *ALIVE)),
    *(f"own:trained fault={fault}" for fault in ("", "no copy")),
    *(f"own:accumulated fault={fault}" for fault in ("", "no copy")),
    *(f"own:per_block fault={fault}" for fault in ("", "uncompiled")),
    *("own:pair", "own:reading_rank", "own:own_axis", *NOWHERE),
    *(f"own:ending how={how}" for how in ENDINGS),
]
ON_FOUR = [f"own:two_axes fault={fault}" for fault in ("depth", "group")]
OF_LLAMA = ["own_llama:build fault=", "own_llama:build fault=constant"]
EAGER = "compile.backend=eager"
"""What Dynamo captures shows a fault in a Llama, in half the time."""


def together(folder: Path, names: list[str], *, eager: Sequence[str] = (), **options: Any) -> dict[str, GateRun]:
    """Targets, each with one setting of its own, one after the other in the same ranks; some by Dynamo alone."""
    jobs = {}
    for number, name in enumerate(names):
        target, _, setting = name.partition(" ")
        overrides = [EAGER if name in eager else AOT[0], *filter(None, [setting])]
        jobs[f"run{number}"] = {"target": f"tests.gate.{target}", "overrides": overrides, "device": "cpu"}
    found = run_many(folder, jobs, **options)
    return dict(zip(names, found.values(), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    return together(tmp_path_factory.mktemp("targets"), SHARED)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    return together(tmp_path_factory.mktemp("four"), ON_FOUR, nproc=4)


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    pytest.importorskip("transformers")
    return together(tmp_path_factory.mktemp("llama"), OF_LLAMA, eager=OF_LLAMA[1:])


def gate(run_dir: Path, target: str, *settings: str, nproc: int = 2) -> GateRun:
    sets = [part for setting in (*AOT, *settings) for part in ("--set", setting)]
    return run_gate(run_dir, "--target", target, *sets, nproc=nproc)


def checks_of(run: GateRun) -> dict[CheckId | Layer, Check]:
    return by_id(run.judged.checks)


def line_of(mark: str, file: Path = OWN) -> int:
    """The first line that ends with this comment."""
    return next(number for number, text in enumerate(file.read_text().splitlines(), 1) if text.endswith(f"# {mark}"))


@pytest.mark.parametrize("style", ["functional", "planned"])
def test_a_healthy_program_passes_with_its_numbers_and_a_different_length(style: str, runs: dict[str, GateRun]) -> None:
    run = runs[f"own:{style} fault="]
    assert run.exit_code == 0, run.judged.summary
    assert "mode" not in run.judged.summary
    found = checks_of(run)
    asked = [CheckId.GRAPHS, CheckId.STEADY, CheckId.FORWARD, CheckId.EAGER]
    if style == "functional":  # a plan cannot be compiled with a dynamic length on torch 2.13
        asked.append(CheckId.UNBROKEN_RESIZED)
    assert {found[name].status for name in asked} == {Status.PASS}
    assert compare(run.run_dir)[0] == 0


def assert_named(run: GateRun, file: Path, line: int) -> None:
    """In the text, in JUnit, in the step summary, as the first annotation, or behind where the ranks parted."""
    assert run.exit_code == 1, run.judged.summary
    place = f"{file.name}:{line}"
    code, text = compare(run.run_dir)
    assert code == 1 and place in text
    assert place in junit.render(run.judged)
    assert place in github.summary(run.judged).replace("\\", "")
    has_flow = run.judged.lead is not None and run.judged.lead.parted is not None
    shown = list(github.annotations(run.judged, ROOT))[: 3 if has_flow else 1]
    assert any(one.startswith(f"::error file=tests/gate/{file.name},line={line},") for one in shown), shown


@pytest.mark.parametrize(
    ("style", "fault"), [*itertools.product(["functional", "planned"], ALIVE), ("functional", "layout")]
)
def test_a_fault_is_named_with_the_line_of_the_user_in_every_report(
    style: str, fault: str, runs: dict[str, GateRun]
) -> None:
    assert_named(runs[f"own:{style} fault={fault}"], OWN, line_of(fault))


def test_a_plan_with_a_different_layout_ends_the_run_with_the_line_of_the_collective(tmp_path: Path) -> None:
    """With Python 3.12 the executed lines are known: the branch that chose the plan leads."""
    run = gate(tmp_path / "run", "tests.gate.own:planned", "fault=layout")
    if not IS_POSSIBLE:
        assert_named(run, OWN, line_of("plan"))
        return
    lead = run.judged.lead
    assert run.exit_code == 1 and lead is not None and lead.line is not None
    assert lead.line.code == 'if fault == "layout" and dist.get_rank() == 1:'


def test_a_missing_collective_ends_the_run_before_it_hangs(tmp_path: Path) -> None:
    """Long before gate.store_timeout_s: the rank without it has left the phase."""
    run = gate(tmp_path / "run", "tests.gate.own:functional", "fault=missing")
    assert_named(run, OWN, line_of("collective"))
    check = run.failed()[CheckId.AGREED]
    assert "rank 0 compiled all_reduce(" in check.observed
    assert "rank 1 last seen" in check.observed
    assert check.ranks == (1,)


def test_a_model_of_transformers_under_its_own_plan_passes_with_its_numbers(of_llama: dict[str, GateRun]) -> None:
    run = of_llama["own_llama:build fault="]
    assert run.exit_code == 0, run.judged.summary
    found = checks_of(run)
    assert {found[name].status for name in (CheckId.GRAPHS, CheckId.FORWARD, CheckId.EAGER)} == {Status.PASS}


def test_a_fault_around_it_is_named_with_the_line_of_the_user(of_llama: dict[str, GateRun]) -> None:
    assert_named(of_llama["own_llama:build fault=constant"], LLAMA, line_of("constant", LLAMA))


def test_a_break_around_it_that_ends_the_run_is_named_with_the_line_of_the_user(tmp_path: Path) -> None:
    """In a graph whose collectives begin before it: the break is named, not the collectives behind it."""
    pytest.importorskip("transformers")
    run = gate(tmp_path / "run", "tests.gate.own_llama:build", EAGER, "fault=break")
    assert_named(run, LLAMA, line_of("break", LLAMA))


def test_a_collective_behind_those_of_all_ranks_ends_the_run_and_is_named_with_its_line(tmp_path: Path) -> None:
    run = gate(tmp_path / "run", "tests.gate.own:functional", "fault=one more")
    assert_named(run, OWN, line_of("one more"))
    assert run.failed()[CheckId.AGREED].observed.startswith("#1 ")


def test_a_different_plan_on_one_rank_is_a_missing_collective(tmp_path: Path) -> None:
    """It is issued by a line of transformers."""
    pytest.importorskip("transformers")
    run = gate(tmp_path / "run", "tests.gate.own_llama:build", EAGER, "fault=layout")
    assert run.exit_code == 1
    (check,) = (check for check in run.failed().values() if check.id == CheckId.AGREED)
    assert "all_reduce(" in check.observed and (check.ranks, check.is_rank_known) == ((0, 1), False)


def test_a_rank_that_hangs_while_it_builds_is_named(tmp_path: Path) -> None:
    """Rank 0 distributes a weight that the plan of rank 1 leaves out."""
    run = gate(tmp_path / "run", "tests.gate.own:planned", "fault=missing", "gate.store_timeout_s=8")
    arrived = run.failed()[CheckId.ARRIVED]
    assert re.search("running .*target/build", arrived.observed)
    assert arrived.is_consequence
    assert re.search("finished .*target/build", run.judged.summary)
    assert run.judged.lead is not None and run.judged.lead.line is not None
    assert run.judged.lead.ranks == (1,)
    code = run.judged.lead.line.code  # the branch, where lines are recorded and torch knows which collective came of it
    assert run.judged.lead.line.file == str(OWN) and ('fault == "missing"' in code or "parallelize_module" in code)


def test_an_exception_of_the_compiler_is_named_with_the_line_of_the_user(tmp_path: Path) -> None:
    run = gate(tmp_path / "run", "tests.gate.own:functional", "fault=raises")
    (check,) = run.failed().values()
    assert "BackendCompilerFailed" in check.observed and "all_reduce backward" in check.details[0]
    assert check.line is not None and check.line.file.endswith("own.py") and check.line.function == "forward"


def test_wrong_numbers_on_all_ranks_alike_are_red(runs: dict[str, GateRun]) -> None:
    assert set(runs["own:functional fault=wrong"].failed()) == {CheckId.FORWARD}


def test_a_train_step_is_compared_with_one_device(runs: dict[str, GateRun]) -> None:
    run = runs["own:trained fault="]
    assert run.exit_code == 0, run.judged.summary
    (check,) = runs["own:trained fault=no copy"].failed().values()
    assert check.id == CheckId.FORWARD and "gradient" in check.observed  # that of each rank's shard alone


def test_the_gradient_of_an_input_is_compared_with_that_on_one_device(runs: dict[str, GateRun]) -> None:
    run = runs["own:accumulated fault="]
    assert run.exit_code == 0, run.judged.summary
    (check,) = runs["own:accumulated fault=no copy"].failed().values()
    assert check.id == CheckId.FORWARD and "forward.1" in check.observed  # the second of what the step returns


def test_a_block_that_one_rank_does_not_compile_is_named(runs: dict[str, GateRun]) -> None:
    """The other blocks compile the same graph, so that no layer differs."""
    assert runs["own:per_block fault="].exit_code == 0, runs["own:per_block fault="].judged.summary
    (check,) = runs["own:per_block fault=uncompiled"].failed().values()
    assert check.ranks == (1,) and re.search(r"3 times .*2 times", check.observed)
    assert check.line is not None and check.line.function == "Functional.forward"


def test_groups_of_an_axis_are_compared_apart(on_four: dict[str, GateRun]) -> None:
    """They may issue different collectives: the second issues twice as many."""
    run = on_four["own:two_axes fault=depth"]
    assert run.exit_code == 0, run.judged.summary
    assert set(run.judged.domains) == {"tp 0-1", "tp 2-3"}
    assert groups_of(run) == {"tp", "dp"}


def groups_of(run: GateRun) -> set[str]:
    """Groups in which rank 0 compiled collectives."""
    compiles = RunDir(run.run_dir).read_records()[0].compiles
    return {issued.group for compile_ in compiles for issued in compile_.collectives}


def test_groups_are_called_as_the_mesh_of_the_target_calls_them(runs: dict[str, GateRun]) -> None:
    run = runs["own:own_axis"]
    assert run.exit_code == 0, run.judged.summary
    assert groups_of(run) == {"model"}


def test_a_fault_in_a_group_of_an_axis_is_that_group_s(on_four: dict[str, GateRun]) -> None:
    red = on_four["own:two_axes fault=group"].judged
    assert {d.domain for d in red.divergences if d.is_red} == {"tp 2-3"}


def test_a_program_and_its_inputs_are_a_target_whose_numbers_are_not_compared(runs: dict[str, GateRun]) -> None:
    run = runs["own:pair"]
    assert run.exit_code == 0
    check = checks_of(run)[CheckId.FORWARD]
    assert check.status == Status.SKIPPED


def test_what_a_target_allows_is_in_the_run_directory(runs: dict[str, GateRun]) -> None:
    run = runs["own:reading_rank"]
    assert run.exit_code == 0, run.judged.summary
    (allow,) = RunDir(run.run_dir).read_config().gate.allow
    assert allow.reason == "each rank scales its own input, on purpose"
    assert compare(run.run_dir)[0] == 0


@pytest.mark.parametrize("how", ENDINGS)
def test_however_a_target_ends_there_is_a_verdict_with_its_exit_code(how: str, runs: dict[str, GateRun]) -> None:
    code, text = ENDINGS[how]
    verdict = runs[f"own:ending how={how}"].judged
    assert (verdict.exit_code, text in verdict.summary) == (code, True), verdict.summary


@pytest.mark.parametrize("how", LAST)
def test_however_a_target_ends_its_ranks_there_is_a_verdict(how: str, tmp_path: Path) -> None:
    run = gate(tmp_path / "run", "tests.gate.own:ending", f"how={how}", "gate.phase_timeout_s=8")
    code, text = LAST[how]
    assert (run.judged.exit_code, text in run.judged.summary) == (code, True), run.judged.summary
    check = next(iter(run.failed().values()))
    assert check.line is not None and check.line.file == str(OWN)
    assert ("raise" if "raises" in how else "time.sleep") in check.line.code


@pytest.mark.parametrize("target", NOWHERE)
def test_a_target_that_is_not_there_is_one_line(target: str, runs: dict[str, GateRun]) -> None:
    verdict = runs[target].judged
    assert (verdict.exit_code, NOWHERE[target] in verdict.summary) == (ExitCode.USAGE, True)


def test_a_rank_that_raises_at_once_waits_for_those_that_still_start(tmp_path: Path) -> None:
    """They could not report: rank 0, which is late here, would be named in place of rank 1, which raised."""
    target = ["--target", "tests.gate.own:ending", "--set", "how=raises on one", "--set", AOT[0]]
    command = [OWN.with_name("late_start.py"), "--run-dir", tmp_path / "run", "--device", "cpu", *target]
    ended = torchrun(command)
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None, ended.stderr[-1500:]
    assert re.search("ValueError .*target/build", verdict.summary)
    assert {check.id for check in verdict.checks if check.status == Status.FAIL} == {CheckId.NO_ERROR}


@pytest.mark.parametrize(
    ("code", "error"), [("import nowhere_at_all", "ModuleNotFoundError"), ("def build(ctx:", "SyntaxError")]
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(code: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(f"# their model\n{code}\n")
    flags = ["--quiet-report", "--device", "cpu", "--run-dir", "run", "--target", "theirs:build"]
    ended = torchrun([REPRO, *flags], cwd=tmp_path)
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None and (ended.returncode, verdict.exit_code) == (1, ExitCode.FAIL)
    assert re.search(f"{error} .*target/build", verdict.summary)
    if not code.startswith("def"):
        assert "theirs.py:2" in verdict.summary


def test_a_rank_whose_record_cannot_be_written_is_the_machine(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "rank_1" / "record.json").mkdir(parents=True)  # in the way
    flags = ["--set", AOT[0], "--device", "cpu", "--nproc", "2", "--run-dir", run_dir]
    ended = run_python(["-m", "tpcompile", "gate", "--target", "tests.gate.own:pair", *flags])
    assert ended.returncode == ExitCode.ENVIRONMENT, ended.stdout[-1500:] + ended.stderr[-1500:]
    assert re.search("rank 1 .*not write .*record", ended.stdout)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--target", "tests.gate.own"], "--target tests.gate.own: write MODULE:FUNCTION"),
        (
            ["--target", "./own.py:pair"],
            "--target ./own.py:pair: write MODULE:FUNCTION, the module as Python imports it",
        ),
        (["--target", "tests.gate.own:pair", "--preset", "cpu_smoke"], "--preset is for the gate's own block"),
        (["--target", "tests.gate.own:pair", "--fault", "killed"], "--fault is for the gate's own block"),
        (["--target", "tests.gate.own:pair", "--set", "gate.nosuch=1"], "unknown config key 'nosuch'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_a_rank_starts(flags: list[str], text: str) -> None:
    ended = run_python(["-m", "tpcompile", "gate", "--device", "cpu", *flags])
    assert (ended.returncode, ended.stderr.count("\n")) == (ExitCode.USAGE, 1)
    assert text in ended.stderr


DEFAULTS = """
[tool.tpcompile]
preset = "cpu_smoke"
layers = 1
train = true
set = ["gate.steady_calls=3", "block.seq_len=32"]
"""


def in_job(run_dir: Path, *flags: str, cwd: Path | None = None, **environ: str) -> Ended:
    """As `torchrun --no-python tpcompile gate FLAGS`, which tests/test_commands.py runs as a user does."""
    command = [IN_JOB, *flags, "--set", AOT[0], "--run-dir", run_dir, "--device", "cpu"]
    return torchrun(command, environ={**os.environ, **environ, "PYTHONPATH": PYTHONPATH}, cwd=cwd)


def test_a_rank_of_a_job_that_is_there_already_runs_it(tmp_path: Path) -> None:
    run_dir, summary = tmp_path / "run", tmp_path / "summary.md"
    flags = ["--target", "tests.gate.own:functional", "--set", "fault=constant"]
    ended = in_job(run_dir, *flags, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert ended.returncode == 1
    assert f"own.py,line={line_of('constant')}" in ended.stdout
    assert "own.py" in summary.read_text() and (run_dir / "junit.xml").exists()
    assert json.loads((run_dir / "verdict.json").read_text())["exit_code"] == 1


def test_with_json_such_a_job_has_the_verdict_alone_on_stdout(tmp_path: Path) -> None:
    """Rank 1 prints, which breaks its graph."""
    ended = in_job(tmp_path / "run", "--json", "--target", "tests.gate.own:functional", "--set", "fault=break")
    assert json.loads(ended.stdout) == json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert ended.returncode == 1 and "hidden torch.Size" in ended.stderr


def test_with_q_such_a_job_prints_the_last_lines_alone(tmp_path: Path) -> None:
    """In a folder whose pyproject.toml has defaults for the gate's own block, as in docs/ci.md."""
    (tmp_path / "pyproject.toml").write_text(DEFAULTS)
    ended = in_job(tmp_path / "run", "-q", "--target", "tests.gate.own:pair", cwd=tmp_path)
    assert RunDir(tmp_path / "run").read_config().model_dump()["settings"] == {}
    assert ended.stdout.splitlines()[0].startswith("PASS (exit 0)")
    run = tmp_path / "run"
    assert ended.stdout.splitlines()[1:] == [f"replay: tpcompile compare {run}", f"page: tpcompile report {run}"]
