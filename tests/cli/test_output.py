"""`tpcompile` in a shell: version, pipes that are closed, disks that are full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tpcompile
from tests.forked import PYTHONPATH, run_python
from tests.report import samples
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate import faults

FULL = Path("/dev/full")


def shell(command: str, *, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a bash command in which `tpcompile` is `python -m tpcompile`."""
    script = f'set -o pipefail; tpcompile() {{ "{sys.executable}" -m tpcompile "$@"; }}; {command}'
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **environ}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=env, cwd=cwd)


def test_version_is_one_line() -> None:
    assert shell("tpcompile --version").stdout == f"tpcompile {tpcompile.__version__}\n"


def test_completion_is_offered_for_the_shell() -> None:
    done = shell(
        "tpcompile gate --pre", COMP_WORDS="tpcompile gate --pre", COMP_CWORD="2", _TPCOMPILE_COMPLETE="complete_bash"
    )
    assert done.stdout.split() == ["--preset"]


@pytest.mark.parametrize("command", ["presets", "-h", "gate -h"])
def test_a_closed_pipe_is_no_error(command: str) -> None:
    done = shell(f"tpcompile {command} | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_stdout_that_was_never_opened_is_no_error(closed: str) -> None:
    done = shell(f"tpcompile version {closed}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line_and_no_bug() -> None:
    done = shell("tpcompile presets > /dev/full")
    assert done.returncode in (0, 4)
    assert " bug " not in done.stderr and "Traceback" not in done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr


def test_presets_in_a_pipe_are_a_line_each() -> None:
    lines = shell("tpcompile presets | cat", COLUMNS="20").stdout.splitlines()
    assert len(lines) == 1 + len(list((Path(PYTHONPATH.split(os.pathsep)[0]) / "configs").glob("*.yaml")))


@pytest.mark.slow
def test_faults_are_a_line_each() -> None:
    environ = {**os.environ, "COLUMNS": "20", "FORCE_COLOR": "1"}
    ended = run_python(["-m", "tpcompile", "gate", "--fault", "list"], environ=environ)
    rows = [line.split("\t") for line in ended.stdout.splitlines()]
    assert ended.returncode == 0 and rows == [[fault.name, fault.what] for fault in faults.ALL.values()]


@pytest.mark.parametrize("sink", ["| true", "> /dev/full"])
def test_the_exit_code_of_compare_is_that_of_the_verdict_whatever_becomes_of_stdout(tmp_path: Path, sink: str) -> None:
    run = RunDir.create(tmp_path / "red")
    run.write_verdict(samples.failing())
    code = f"""
import sys
from tpcompile import cli
from tpcompile.gate import replay
from tests.report import samples
replay.replay = lambda *_: samples.failing()
sys.argv = ["tpcompile", "compare", {str(run.path)!r}]
cli.main()
"""
    script = tmp_path / "compare.py"
    script.write_text(code)
    done = shell(f"{sys.executable} {script} {sink}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("typer.Exit(6)", 6), ("typer.Exit()", 0), ("ConfigError('no such mesh')", 2),
        ("SystemExit('no such mesh')", 1),
    ],
)  # fmt: skip
def test_a_command_that_leaves_at_once_keeps_its_code_its_output_and_what_is_to_be_done_at_exit(
    raised: str, code: int
) -> None:
    lines = f"""
import atexit, typer
from tpcompile.cli import ending
from tpcompile.errors import ConfigError

class TakenApart:
    def __del__(self):
        print("taken apart")

kept, app = TakenApart(), ending.new_app()
atexit.register(print, "at exit")

@app.command()
def command():
    print("verdict")
    raise {raised}

ending.run_and_leave(app, "command")
"""
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split("\n")) == (code, ["verdict", "at exit", ""])
    assert ("no such mesh" in ended.stderr) == (code in (1, 2))


def test_what_is_a_bug_is_still_called_one(tmp_path: Path) -> None:
    script = tmp_path / "bug.py"
    script.write_text(
        "import sys\nfrom tpcompile import cli, launch\nlaunch.plan = lambda request: 1 // 0\n"
        "sys.argv = ['tpcompile', 'gate']\ncli.main()\n"
    )
    done = shell(f"{sys.executable} {script}", cwd=tmp_path)
    assert (done.returncode, " bug " in done.stderr) == (3, True)


def test_a_disk_that_fills_up_in_the_middle_is_the_environment_and_no_bug(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(
        "import errno, sys\nfrom tpcompile import cli, launch\n"
        "def plan(request): raise OSError(errno.ENOSPC, 'No space left on device', 'file')\nlaunch.plan = plan\n"
        "sys.argv = ['tpcompile', 'gate']\ncli.main()\n"
    )
    done = shell(f"{sys.executable} {script}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (4, f"error: file: {os.strerror(errno.ENOSPC)}\n")
