"""What a rank knows about the processes of the other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import torchrun
from tests.gate.threads import stores
from tpcompile.choices import ALL_MODES, TARGET, AnyMode, phases_of
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate import status as module
from tpcompile.gate.status import ENDED, StatusBoard


@pytest.fixture
def gone() -> int:
    """The id of a process that was there."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_that_died_before_it_published_its_end_is_known(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = [StatusBoard(RunDir.create(tmp_path), store) for store in stores(3)]
    boards[0].enter("C/first")
    assert boards[0].died() == {}  # the others have not started
    monkeypatch.setattr(os, "getpid", lambda: gone)
    boards[1].enter("C/first")
    assert list(boards[0].died()) == [1]
    assert f"its process {gone} died" in boards[0].died()[1]
    for state in ENDED:
        boards[1].publish(state)
        assert boards[0].died() == {}


def test_of_a_process_on_a_different_host_nothing_is_known(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = [StatusBoard(RunDir.create(tmp_path), store) for store in stores(2)]
    monkeypatch.setattr(os, "getpid", lambda: gone)
    monkeypatch.setattr(module, "this_host", lambda: "elsewhere")
    boards[1].enter("C/first")
    assert boards[0].died() == {}


def test_without_a_store_the_status_is_still_written_to_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store,) = stores(1)

    def refuse(*given: object) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(store, "put", refuse)
    StatusBoard(RunDir.create(tmp_path), store).publish("failed", error="ValueError")
    (status,) = RunDir(tmp_path).read_statuses()
    assert (status.state, status.error) == ("failed", "ValueError")


@pytest.mark.parametrize(
    ("flags", "modes"),
    [
        (["--mode", "all", "--set", "gate.resized_seq_len=16"], ALL_MODES),
        (["--target", "tests.gate.own:functional"], (TARGET,)),
    ],
)
def test_the_phases_of_the_bar_are_those_of_a_run(flags: list[str], modes: Sequence[AnyMode], tmp_path: Path) -> None:
    command = [Path(__file__).with_name("telling_phases.py"), *flags, "--run-dir", tmp_path / "run"]
    command += ["--device", "cpu", "--set", "compile.backend=eager", "--set", "gate.steady_calls=1"]
    ended = torchrun([*command, "--quiet-report"], nproc=1)
    entered = [line.removeprefix("enters ") for line in ended.stdout.splitlines() if line.startswith("enters ")]
    assert tuple(entered) == phases_of(modes), ended.stderr[-1500:]


def test_without_a_run_directory_the_status_is_still_published_in_the_store(tmp_path: Path) -> None:
    boards = [StatusBoard(RunDir(tmp_path / "file" / "run"), store) for store in stores(2)]
    (tmp_path / "file").write_text("")
    boards[0].enter("C/first")
    boards[0].publish("failed", error="ValueError")
    assert "C/first" in boards[1].last_seen(0)
