"""What a launch prints besides its verdict, and what is left when the launcher is killed."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.forked import PYTHONPATH, became, run_python
from tests.gate.runs import leftovers
from tests.test_launch import a_plan
from tpcompile import launch
from tpcompile.errors import PreflightError
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir

UNDER_TORCHRUN = """
import sys
from pathlib import Path
from rich.console import Console
from tests.test_launch import a_plan
from tpcompile import launch
launch.run(a_plan(Path(sys.argv[1]), sys.argv[2], torchrun=True), Console())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("behaviour", "is_shown"), [("red", False), ("refused", False), ("silent_error", True)])
def test_torchruns_report_is_shown_only_where_no_rank_reported(tmp_path: Path, behaviour: str, is_shown: bool) -> None:
    program = tmp_path / "under_torchrun.py"
    program.write_text(UNDER_TORCHRUN)
    ended = run_python([program, tmp_path, behaviour], environ={**os.environ, "PYTHONPATH": PYTHONPATH})
    log, err = tmp_path / "run" / "logs" / "torchrun.log", ended.stderr
    assert "ChildFailedError" in log.read_text()
    assert ("ChildFailedError" in err) is is_shown
    assert bool(re.search(rf"torchrun's own report, \d+ lines: {log}", err)) is not is_shown


@pytest.mark.slow
def test_what_torch_warned_of_is_counted_and_in_the_log(tmp_path: Path) -> None:
    program = tmp_path / "under_torchrun.py"
    program.write_text(UNDER_TORCHRUN)
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    ended = run_python([program, tmp_path, "pass_warned"], environ={**environ, "PYTHONPATH": PYTHONPATH})
    log = tmp_path / "run" / "logs" / "torchrun.log"
    assert log.read_text().count("a warning") == 2 and "a warning" not in ended.stderr
    assert re.search(rf"torch warned .*\d+ lines: {log}", ended.stderr)


def test_with_json_stdout_has_the_verdict_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = a_plan(tmp_path, "pass_talking")
    out = io.StringIO()
    assert launch.run(plan, Console(file=out), amount="json") == 0
    assert Verdict.model_validate_json(out.getvalue()) == RunDir(plan.run_dir).read_verdict()
    captured = capfd.readouterr()
    assert (captured.out, "a rank talks" in captured.err) == ("", True)


def test_where_the_disk_is_full_and_no_rank_could_say_so_it_is_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not full, a job of which nobody reported is a bug: tests/test_launch.py."""
    plan = a_plan(tmp_path, "silent")

    def unwritable(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tpcompile.evidence.rundir.temporary", unwritable)
    with pytest.raises(PreflightError, match=f"cannot write .*{tmp_path}.*: {os.strerror(errno.ENOSPC)}"):
        launch.run(plan, Console(file=io.StringIO()))


HANGING = """
import sys
from pathlib import Path
from rich.console import Console
from tests.test_launch import a_plan
from tpcompile import launch
launch.run(a_plan(Path(sys.argv[1]), "hang", timeout_s=4), Console())
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_bar_of_phases_and_a_log_no_control_characters(tmp_path: Path, is_terminal: bool) -> None:
    """`C/first` is the second of six phases; the log would have its first line after 30 s."""
    ours, theirs = os.openpty() if is_terminal else os.pipe()
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    launcher = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    text = b""
    with suppress(OSError):  # EIO: the last process has closed the terminal
        while part := os.read(ours, 4096):
            text += part
    os.close(ours)
    assert launcher.wait(60) == 0
    found = ["\u2501" in text.decode(), "1/6" in text.decode(), "ranks 0-1: C/first" in text.decode()]
    assert found == [is_terminal] * 3, text.decode()
    assert (b"\x1b[" in text) is is_terminal


KILLED = """
import sys
from pathlib import Path
from rich.console import Console
from tests.test_launch import a_plan
from tpcompile import launch
launch.run(a_plan(Path(sys.argv[1]), "hang", torchrun=True), Console())
"""


def processes_of(folder: Path) -> list[psutil.Process]:
    """torchrun and ranks of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            is_one = str(folder) in " ".join(process.cmdline()) and KILLED not in process.cmdline()
        except psutil.Error:
            continue
        if is_one:
            found.append(process)
    return found


@pytest.mark.slow
def test_torchrun_and_its_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    """The control, without the watchdog, is in test_process_tree.py."""
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    launcher = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environ)
    try:
        assert became(lambda: len(RunDir(tmp_path / "run").read_statuses()) == 2, 120)
        assert len(processes_of(tmp_path)) == 3
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert became(lambda: not processes_of(tmp_path), 20)
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert became(lambda: leftovers(tmp_path) == [])
