"""Commands whose process imports torch: Ctrl-C meanwhile ends them without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpcompile.cli.passed_on import becoming

SLOW = """
import sys, time
from tpcompile.cli import ending
print("imports", flush=True)
time.sleep(60)
"""
PLAIN = [sys.executable, "-m"]


def started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """A process as a terminal starts it: what runs in the background of a shell inherits that SIGINT is ignored."""
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(("begins", "is_told"), [(becoming("slow"), False), ([*PLAIN, "slow"], True)])
def test_ctrl_c_before_a_command_begins_prints_nothing(tmp_path: Path, begins: list[str], is_told: bool) -> None:
    """Without the bootstrap, the negative control, Python prints where it was."""
    (tmp_path / "slow.py").write_text(SLOW)
    with started(begins, tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert ("Traceback" in stderr) is is_told


def test_ctrl_c_of_a_command_that_has_begun_is_an_exception(tmp_path: Path) -> None:
    """So that what it has started is ended, and its folders are removed."""
    (tmp_path / "begun.py").write_text(
        "import time, typer\n"
        "from tpcompile.cli import ending\n"
        "app = ending.new_app()\n"
        "@app.command()\n"
        "def wait() -> None:\n"
        "    try:\n"
        "        print('began', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('removed', flush=True)\n"
        "ending.run(app, 'wait')\n"
    )
    with started(becoming("begun"), tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (stdout, process.returncode, "Traceback" in stderr) == ("removed\n", 130, False)
