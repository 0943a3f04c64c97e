"""The forked jobs of the tests: exit codes, output, the limit and what is left running, as of real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, run_python, torchrun

PROGRAM = """
import os, signal, subprocess, sys, time
rank, form = int(os.environ["RANK"]), sys.argv[1]
if form == "ends":
    import numpy
    print("rank", rank, "of", os.environ["WORLD_SIZE"], "draws", numpy.random.rand())
if form == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if form == "raises" and rank == 1:
    raise ValueError("seven of nine")
if form in ("killed", "raises", "hangs"):
    time.sleep(600)
if form == "leaves":
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("left", left.pid)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_ranks_that_end_well_have_their_own_number_and_draw_their_own_values(program: Path) -> None:
    pytest.importorskip("numpy")
    ended = torchrun([program, "ends"])
    assert (ended.returncode, ended.left_running) == (0, ())
    said = sorted(line.split(" draws ") for line in ended.stdout.splitlines())
    assert [line for line, _ in said] == ["rank 0 of 2", "rank 1 of 2"]
    assert said[0][1] != said[1][1]


@pytest.mark.parametrize(("form", "why"), [("raises", "ValueError: seven of nine"), ("killed", "Signal 9 (SIGKILL)")])
def test_a_rank_that_fails_ends_the_job_and_is_the_root_cause(program: Path, form: str, why: str) -> None:
    ended = torchrun([program, form])
    assert (ended.returncode, ended.left_running) == (1, ())
    assert why in ended.stderr
    assert "rank      : 1 (local_rank: 1)" in ended.stderr.partition("Root Cause")[2]


def test_a_job_past_its_limit_is_killed_with_its_ranks_which_show_where_they_stood(program: Path) -> None:
    ended = torchrun([program, "hangs"], timeout_s=8)
    assert ended.returncode == 124
    assert len(ended.left_running) == 2
    assert ended.stderr.count(f'File "{program}"') >= 2


STARTS = """
import os, time
from tests import forked

def start(context):
    if not os.fork():
        forked._wait_for_all_ranks()
        print("goes on", time.monotonic(), flush=True)
        os._exit(0)
    time.sleep(0.5)  # the next rank is forked now
    print("all are forked", time.monotonic(), flush=True)

forked._start_ranks(None, start)
os.wait()
"""


def test_a_rank_goes_on_when_all_are_forked(tmp_path: Path) -> None:
    """One that connects to the agent's store meanwhile leaves the next rank a lock that is never freed."""
    path = tmp_path / "starts.py"
    path.write_text(STARTS)
    ended = run_python([path], environ={**os.environ, "PYTHONPATH": PYTHONPATH})
    assert [line.rpartition(" ")[0] for line in ended.stdout.splitlines()] == ["all are forked", "goes on"]


def test_what_a_job_leaves_running_is_reported_and_killed(program: Path) -> None:
    ended = torchrun([program, "leaves"])
    assert (ended.returncode, ended.left_running) == (0, ("sleep 600", "sleep 600"))
    pids = [line.removeprefix("left ") for line in ended.stdout.splitlines() if line.startswith("left ")]
    assert len(pids) == 2
    assert not any(is_sleeping(pid) for pid in pids)


def is_sleeping(pid: str) -> bool:
    """Does the process still run its command? A zombie has none."""
    path = Path("/proc", pid, "cmdline")
    return path.exists() and b"sleep" in path.read_bytes()


def test_a_program_ends_with_the_code_and_the_words_it_exits_with(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("import os, sys; print(os.getcwd(), os.environ['SAID']); sys.exit(sys.argv[1])")
    ended = run_python([path, "no GPU"], environ={**os.environ, "SAID": "here"}, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, f"{tmp_path} here\n", "no GPU\n")


@pytest.mark.parametrize(("visible", "forked"), [("", True), ("0", False)])
def test_a_program_that_sees_gpus_is_not_forked_from_a_server_that_sees_none(
    tmp_path: Path, visible: str, forked: bool
) -> None:
    path = tmp_path / "torch.py"
    path.write_text("import sys; print('torch._inductor' in sys.modules)")
    ended = run_python([path], environ={**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    assert (ended.stdout, ended.stderr) == (f"{forked}\n", "")
