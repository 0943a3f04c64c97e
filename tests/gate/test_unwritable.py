"""A run directory that cannot be written from some moment on: a real full disk, or a file in the directory's place."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests import forked
from tests.test_launch import a_plan
from tpcompile import launch
from tpcompile.errors import ExitCode, PreflightError
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir

PROGRAM = Path(__file__).with_name("unwritable.py")
CASES = [
    *(("full", moment) for moment in ("start", "target/first", "C/steady", "verdict", "record.json")),
    *(("gone", moment) for moment in ("config.json", "target/first", "record.json", "verdict.json")),
]
EAGER = ("--set", "compile.backend=eager", "--set", "gate.steady_calls=2")
"""Dynamo alone: what is written, and when, is the same."""
TARGET = ("--target", "tests.gate.own:functional")
"""It compiles in a quarter of the time of the gate's own block."""
BLOCK = ("--set", "gate.resized_seq_len=16")
pytestmark = pytest.mark.timeout(120)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size; the test is skipped where none can be mounted."""
    folder.mkdir()
    tools = [shutil.which(name) for name in ("mount", "umount")]
    if None in tools:
        pytest.skip("no mount here")
    mounted = subprocess.run([str(tools[0]), "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("not permitted to mount")
    try:
        yield folder
    finally:
        subprocess.run([str(tools[1]), "-l", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """For what the gate writes."""
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def spoiled(disk: Path, how: str, moment: str) -> forked.Ended:
    """The gate on two ranks, whose directory becomes unwritable at that moment."""
    program = BLOCK if moment.startswith("C/") else TARGET
    return forked.torchrun([PROGRAM, how, moment, "--run-dir", disk / "run", "--device", "cpu", *EAGER, *program])


def launched(disk: Path, folder: Path, code: int) -> tuple[int, str]:
    """What `tpcompile gate` makes of what such ranks left: exit code and report."""
    ends_so = [sys.executable, "-c", f"raise SystemExit({code})"]
    plan = replace(a_plan(folder, "pass"), run_dir=disk / "run", command=tuple(ends_so))
    out = io.StringIO()
    return launch.run(plan, Console(file=out, width=200)), out.getvalue()


def lines_of_ranks(ended: forked.Ended) -> list[str]:
    """stderr up to torchrun's own report."""
    written = [line for line in ended.stderr.splitlines() if not re.match(r"[WE]\d{4} ", line)]
    is_report = [line.startswith("Traceback") for line in written]
    return written[: is_report.index(True)] if True in is_report else written


@pytest.mark.parametrize(("how", "moment"), CASES)
def test_it_is_the_machine_in_one_line_at_every_moment_of_a_run(
    how: str, moment: str, disk: Path, tmp_path: Path
) -> None:
    ended = spoiled(disk, how, moment)
    reason = "No space left on device" if how == "full" else "Not a directory"
    (line,) = lines_of_ranks(ended)
    assert re.fullmatch(rf"error: .*{disk}/run/\S+: ({reason}|File exists)", line)
    assert ended.returncode == 1 and f"exitcode  : {int(ExitCode.ENVIRONMENT)} " in ended.stderr
    assert ended.left_running == ()
    with pytest.raises(PreflightError, match=f"cannot write .*{disk}/run"):
        launched(disk, tmp_path, ended.returncode)


@pytest.mark.parametrize("how", ["full", "gone"])
def test_once_the_verdict_is_known_it_is_on_the_terminal(how: str, disk: Path, tmp_path: Path) -> None:
    ended = spoiled(disk, how, "junit.xml")
    assert ended.returncode == ExitCode.PASS, ended.stderr
    assert "PASS (exit 0)" in ended.stdout and f"{disk}/run/junit.xml" in ended.stdout
    if how == "full":
        code, report = launched(disk, tmp_path, ended.returncode)
        assert code == ExitCode.PASS and "PASS (exit 0)" in report and "no junit.xml" in report


def test_a_disk_with_room_takes_all_files(disk: Path, tmp_path: Path) -> None:
    """The control of the tests above: a moment that does not come."""
    ended = spoiled(disk, "full", "never")
    assert (ended.returncode, lines_of_ranks(ended)) == (ExitCode.PASS, [])
    found: Verdict | None = RunDir(disk / "run").read_verdict()
    assert found is not None and (disk / "run" / "junit.xml").exists()
    assert launched(disk, tmp_path, ended.returncode)[0] == ExitCode.PASS
