"""The stack an aborted process leaves."""

from __future__ import annotations

from pathlib import Path

from tests.forked import run_python
from tpcompile.sentinel.blackbox import _path, forget, has_aborted, last_stack

ABORTS = """
import ctypes, faulthandler, os, sys, threading, time
from tpcompile.sentinel.blackbox import BlackBox

def innermost():
    os.abort()  # here

box = BlackBox()
box.open()
print(box.name, threading.get_ident(), flush=True)
innermost()
"""


def left_by(program: str, tmp_path: Path) -> tuple[str, int]:
    """Black box and main thread of a process that ran this."""
    script = tmp_path / "job.py"
    script.write_text(program)
    name, ident = run_python([script]).stdout.split()
    return name, int(ident)


def innermost(name: str, ident: int) -> list[str]:
    """Functions of the program; what forked the process, and ran the program in it, comes before them."""
    return [line.function for line in last_stack(name, ident)[-2:]]


def test_a_crash_is_told_from_an_abort(tmp_path: Path) -> None:
    name, ident = left_by(ABORTS.replace("os.abort()", "faulthandler._sigsegv()"), tmp_path)
    assert not has_aborted(name, ident)
    assert innermost(name, ident) == ["<module>", "innermost"]
    forget(name)


def test_a_program_that_calls_abort_is_told_from_one_that_a_thread_of_gloo_ends(tmp_path: Path) -> None:
    name, ident = left_by(ABORTS, tmp_path)
    assert not has_aborted(name, ident)
    forget(name)
    by_thread = "threading.Thread(target=ctypes.CDLL(None).abort).start(); time.sleep(60)"
    name, ident = left_by(ABORTS.replace("os.abort()", by_thread), tmp_path)
    assert has_aborted(name, ident)
    assert innermost(name, ident) == ["<module>", "innermost"]
    forget(name)


def test_an_aborted_process_leaves_the_users_frames_of_its_main_thread(tmp_path: Path) -> None:
    name, ident = left_by(ABORTS, tmp_path)
    stack = last_stack(name, ident)
    assert innermost(name, ident) == ["<module>", "innermost"]
    assert stack[-1].code == "os.abort()  # here"
    assert last_stack(name, ident + 1) == ()
    forget(name)
    assert not _path(name).exists()


def test_faulthandler_that_the_program_enabled_writes_there_too_and_stays_enabled(tmp_path: Path) -> None:
    """torchrun's `record` decorator enables it."""
    name, ident = left_by(f"import faulthandler\nfaulthandler.enable()\n{ABORTS}", tmp_path)
    assert innermost(name, ident) == ["<module>", "innermost"]
    forget(name)
    for was_enabled in (True, False):
        first = "faulthandler.enable()\n" if was_enabled else ""
        ends = f"box.close()\nif faulthandler.is_enabled() is not {was_enabled}:\n    print('a third word')\n"
        program = f"import faulthandler\n{first}{ABORTS.removesuffix('innermost()' + chr(10))}{ends}"
        script = tmp_path / "closes.py"
        script.write_text(program)
        name, _ = run_python([script]).stdout.split()
        assert not _path(name).exists()


def test_a_process_that_was_killed_leaves_nothing() -> None:
    assert last_stack("", 1) == () and not has_aborted("", 1)
    assert last_stack("0123456789abcdef", 1) == ()
