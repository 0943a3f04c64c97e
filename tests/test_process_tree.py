"""A command with all its processes: how it ended, and that nothing of it runs afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, became
from tpcompile import process_tree
from tpcompile.process_tree import Outcome, run_tree, sweep

TREE = """
import os, signal, subprocess, sys
mark, how = sys.argv[1:]
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sh", "-c", "sleep 600 # " + mark], start_new_session=True)
print("begun", flush=True)
if how != "ends":
    child.wait()
"""
KILLED = """
import os, sys
from contextlib import nullcontext
from tpcompile import process_tree
if sys.argv[1] == "unwatched":
    process_tree._watched = lambda launch_id: nullcontext()
process_tree.run_tree(sys.argv[2:], environ=os.environ, timeout_s=600)
"""


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    """In the command line of a process of the tree, which has a session of its own."""
    found = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    yield found
    sweep(lambda process: found in " ".join(process.cmdline()))


def tree(mark: str, how: str) -> list[str]:
    return [sys.executable, "-c", TREE, mark, how]


def is_running(mark: str) -> bool:
    shells = subprocess.run(["ps", "-C", "sh", "-o", "args"], capture_output=True, text=True, check=False).stdout
    return mark in shells


@pytest.mark.parametrize("is_swept", [True, False])
def test_a_process_that_left_the_session_is_ended_after_a_normal_end(
    mark: str, is_swept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_swept:
        monkeypatch.setattr(process_tree, "_sweep_launch", lambda launch_id: None)
    assert run_tree(tree(mark, "ends"), environ=os.environ, timeout_s=30) == Outcome(exit_code=0)
    assert is_running(mark) is not is_swept


def test_a_tree_that_ignores_the_end_of_its_time_is_killed_after_the_grace(mark: str) -> None:
    outcome = run_tree(tree(mark, "stubborn"), environ=os.environ, timeout_s=1.0, grace_s=0.2)
    assert outcome == Outcome(exit_code=-signal.SIGKILL, timed_out=True)
    assert not is_running(mark)


@pytest.mark.parametrize("watch", ["watched", "unwatched"])
def test_a_launcher_that_is_killed_leaves_nothing_running(mark: str, watch: str) -> None:
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    launcher = subprocess.Popen([sys.executable, "-c", KILLED, watch, *tree(mark, "waits")], env=environ)
    assert became(lambda: is_running(mark))
    launcher.kill()
    launcher.wait()
    is_watched = watch == "watched"
    assert became(lambda: not is_running(mark), 60 if is_watched else 1) is is_watched


def test_all_of_a_large_output_is_handed_over(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; [print('x' * 200, number, file=sys.stderr) for number in range(50_000)]; sys.exit(3)"
    outcome = run_tree([sys.executable, "-c", code], environ=os.environ, timeout_s=60, on_line=lines.append)
    assert outcome == Outcome(exit_code=3)
    assert [int(line.split()[1]) for line in lines] == list(range(50_000))
