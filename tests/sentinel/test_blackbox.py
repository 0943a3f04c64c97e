"""The stack an aborted process leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tpcompile.sentinel.blackbox import forget, last_stack

ABORTS = """
import os, sys, threading
from tpcompile.sentinel.blackbox import BlackBox

def innermost():
    os.abort()  # here

box = BlackBox()
box.open()
print(box.path, threading.get_ident(), flush=True)
innermost()
"""


def test_an_aborted_process_leaves_the_users_frames_of_its_main_thread(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(ABORTS)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=120)
    path, ident = ended.stdout.split()
    stack = last_stack(path, int(ident))
    assert [line.function for line in stack] == ["<module>", "innermost"]
    assert stack[-1].code == "os.abort()  # here"
    assert last_stack(path, int(ident) + 1) == ()
    forget(path)
    assert not Path(path).exists()


def test_a_process_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    assert last_stack("", 1) == ()
    assert last_stack(str(tmp_path / "gone"), 1) == ()
