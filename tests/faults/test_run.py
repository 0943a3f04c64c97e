"""A few cases for real; the whole corpus is `tpcompile faults run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tpcompile import cli
from tpcompile.errors import DirectoryTakenError
from tpcompile.evidence.rundir import RunDir
from tpcompile.faults import run
from tpcompile.faults.cases import find
from tpcompile.faults.judge import Outcome
from tpcompile.faults.run import run_case
from tpcompile.faults.sweep import sweep
from tpcompile.gate.replay import replay


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stride", "getrank_constant", "reduce_op"])
def test_a_planted_fault_is_named_in_seconds(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name != "stride":  # one as users start it
        request.getfixturevalue("forked_ranks")
    result = run_case(find(name), tmp_path)
    assert (result.outcome, result.why) == (Outcome.NAMED, "")
    assert result.seconds is not None and result.seconds < 10
    left = RunDir(tmp_path / name / "run")
    assert replay(left) == left.read_verdict()  # `tpcompile compare` says the same of what a sentinel left


@pytest.mark.slow
def test_a_healthy_program_stays_green(tmp_path: Path, forked_ranks: None) -> None:
    assert run_case(find("compile_order"), tmp_path).outcome == Outcome.GREEN


@pytest.mark.slow
def test_a_case_past_its_limit_is_a_hang_and_leaves_nothing_behind(tmp_path: Path) -> None:
    case = find("slow_rank").model_copy(update={"limit_s": 2.0})
    assert run_case(case, tmp_path).outcome == Outcome.HANG
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case ends at once, without a verdict."""

    def launch(case: object, folder: Path, **_: object) -> dict[str, int | bool]:
        (folder / "run").mkdir(parents=True)
        (folder / "reached_1.json").write_text(json.dumps(1.0))
        return {"exit_code": 0, "timed_out": False}

    monkeypatch.setattr(run, "launch", launch)


def _faults(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tpcompile", "faults", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
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


def test_the_list_shows_what_is_planted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _faults(monkeypatch, "list") == 0
    assert "stride" in capsys.readouterr().out


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stride").mkdir()
    with pytest.raises(DirectoryTakenError):
        sweep([find("stride")], tmp_path)
