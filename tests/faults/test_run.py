"""A few cases for real; all of them is `scripts/faults.py run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.faults import app
from tests.faults import run
from tests.faults.case import CASES
from tests.faults.judge import Outcome, Result
from tests.faults.matrix import Matrix
from tests.faults.run import Ended, Launch, finished, torchrun_with
from tests.faults.sweep import sweep
from tests.forked import run_python
from tpcompile.cli import ending
from tpcompile.errors import DirectoryTakenError
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate import faults
from tpcompile.gate.replay import replay

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "faults.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["getrank_constant", "reduce_op"])
def test_a_planted_fault_is_named_in_seconds(name: str, tmp_path: Path, forked_ranks: None) -> None:
    (result,) = sweep([CASES.find(name)], tmp_path)
    check_named(result, tmp_path / name)


def check_named(result: Result, folder: Path) -> None:
    assert (result.outcome, result.why) == (Outcome.NAMED, "")
    assert result.seconds is not None and result.seconds < 10
    left = RunDir(folder / "run")
    assert replay(left) == left.read_verdict()  # `tpcompile compare` says the same of what a sentinel left


@pytest.mark.slow
def test_the_command_starts_ranks_of_their_own_and_names_their_fault(tmp_path: Path) -> None:
    """Up to torchrun its processes are forked; ranks are new ones, since a shell sets the variables of each."""
    matrix = tmp_path / "matrix.json"
    ended = run_python([SCRIPT, "run", "stride", "--run-dir", tmp_path / "kept", "--json", matrix])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (result,) = Matrix.model_validate_json(matrix.read_text()).results
    check_named(result, tmp_path / "kept" / "stride")


@pytest.mark.slow
def test_a_healthy_program_stays_green(tmp_path: Path, forked_ranks: None) -> None:
    (result,) = sweep([CASES.find("compile_order")], tmp_path)
    assert result.outcome == Outcome.GREEN


@pytest.mark.slow
def test_a_healthy_program_with_drawn_parameters_stays_green_and_a_control_is_an_alarm(
    tmp_path: Path, forked_ranks: None
) -> None:
    names = ["logging_on_one_rank", "compiles_on_one_rank"]
    healthy, control = sweep([CASES.find(name) for name in names], tmp_path)
    assert healthy.outcome == Outcome.GREEN
    assert control.outcome == Outcome.FALSE_ALARM and "{0: 2, 1: 1}" in control.why


def test_variables_of_a_rank_are_set_before_python_starts() -> None:
    own = {0: {}, 1: {"A": "it's 1", "PYTHONHASHSEED": "0"}}
    shell = torchrun_with(["-c", "pass"], nproc=2, own=own)
    code = "import os, sys; print(os.environ.get('A'), sys.flags.hash_randomization)"
    at = shell.index("sh")
    for rank, said in (("0", "None 1"), ("1", "it's 1 0")):
        command = [*shell[at : at + 4], "-c", code]
        environ = {"PATH": os.environ["PATH"], "RANK": rank}
        assert subprocess.run(command, env=environ, capture_output=True, text=True).stdout.strip() == said


@pytest.mark.slow
def test_a_case_past_its_limit_is_a_hang_and_leaves_nothing_behind(tmp_path: Path) -> None:
    case = replace(CASES.find("slow_rank"), limit_s=2.0)
    (result,) = sweep([case], tmp_path)
    assert result.outcome == Outcome.HANG
    assert _left(tmp_path) == []


def test_ranks_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'begun').touch()\ntime.sleep(600)\n")
    launch = Launch(out=tmp_path / "out", command=(str(program),), world_size=1, limit_s=600.0, by="exec")
    pid = os.fork()
    if pid == 0:
        list(finished([launch], [{}]))
        os._exit(1)
    wait_until(lambda: (tmp_path / "begun").exists())
    assert _left(program)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: not _left(program))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _left(folder: Path) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case ends at once, without a verdict."""

    def ended(launches: Sequence[Launch], _: object) -> Iterator[tuple[Launch, Ended]]:
        for launch in launches:
            (launch.out / "run").mkdir(parents=True)
            (launch.out / "reached_1.json").write_text(json.dumps(1.0))
            yield launch, Ended(codes={0: 0}, is_hang=False, wall_s=0.0)

    monkeypatch.setattr(run, "finished", ended)


def _faults(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["faults.py", *args])
    with pytest.raises(SystemExit) as end:
        ending.run(app, "scripts/faults.py")
    return int(end.value.code or 0)


def test_the_command_ends_with_1_when_a_fault_is_missed(
    nothing_said: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _faults(monkeypatch, "run", "stride", "--json", str(tmp_path / "matrix.json")) == 1
    assert "1 missed" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "matrix.json").read_text())["results"]
    assert (row["name"], row["outcome"]) == ("stride", "missed")


def test_the_command_ends_with_0_when_all_is_well(nothing_said: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _faults(monkeypatch, "run", "clean", "compile_order", "--jobs", "2") == 0


@pytest.mark.parametrize("args", [("run", "nope"), ("run", "stride", "--columns", "nope")])
def test_unknown_cases_and_columns_are_usage_errors(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    assert _faults(monkeypatch, *args) == 2


@pytest.mark.slow
def test_the_list_shows_all_that_can_be_run_or_injected() -> None:
    environ = {**os.environ, "COLUMNS": "20", "FORCE_COLOR": "1"}
    listed = run_python([SCRIPT, "list"], environ=environ)
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()  # one per case, whatever the width: stdout is no terminal
    assert {*CASES, *faults.ALL} == {line.partition("\t")[0] for line in lines}
    assert all("\t" in line for line in lines)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stride").mkdir()
    with pytest.raises(DirectoryTakenError):
        sweep([CASES.find("stride")], tmp_path)
