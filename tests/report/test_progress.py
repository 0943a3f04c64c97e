from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.report.progress import Progress, num_ended, progress_line


def status(rank: int, state: str = "running", phase: str = "C/first") -> RankStatus:
    """What one of four ranks wrote last."""
    return RankStatus(rank=rank, world_size=4, pid=1, host="h", phase=phase, state=state)


def test_ranks_that_do_the_same_are_named_together_and_the_others_apart() -> None:
    statuses = [status(0), status(1, "compiling 0/0"), status(2, "compiling 0/0")]
    step = "imports torch"
    line = progress_line(statuses, 4, 12.4, starting={3: step})
    after, *parts = re.split(": (?=rank)|; ", line)
    assert after == "12 s"
    assert parts == ["rank 0: C/first", "ranks 1-2: C/first, compiling 0/0", f"rank 3: starting, {step}"]


def test_ranks_that_start_are_told_apart_by_what_they_wait_for(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path), io.StringIO()
    first, second = "imports torch", "waits for the other ranks"
    run.write_start(0, first)
    run.write_start(0, second)
    run.write_start(1, first)
    with Progress(run, 3, Console(file=out, width=200), every_s=0.01):
        assert became(lambda: out.getvalue().count("\n") >= 1)
    _, *parts = re.split(": (?=rank)|; ", out.getvalue().splitlines()[0])
    *own, last = parts
    assert own == [f"rank 0: starting, {second}", f"rank 1: starting, {first}"]
    assert last.startswith("rank 2: starting, ")
    assert not run.holds_run()


def became(condition: Callable[[], bool]) -> bool:
    """Wait until something is so."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_log_gets_a_line_in_intervals(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path), io.StringIO()
    run.write_status(status(0, "compiling 0/0"))
    with Progress(run, 4, Console(file=out, width=20), every_s=0.01):
        assert became(lambda: out.getvalue().count("\n") >= 2)
    (first, *_) = out.getvalue().splitlines()
    assert "compiling 0/0" in first and "ranks 1-3" in first


def test_a_quiet_run_and_a_short_one_print_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    with Progress(RunDir.create(tmp_path), 2, Console(file=out), is_quiet=True, every_s=0.0):
        pass
    with Progress(RunDir.create(tmp_path), 2, Console(file=out)):
        pass
    assert out.getvalue() == ""


LINE = "a line of a rank"
PHASES = ("start", "C/first", "C/steady", "verdict")


def test_on_a_terminal_a_bar_has_the_phases_and_what_the_ranks_do(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path), io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with Progress(run, 2, console, phases=PHASES, every_s=0.01) as progress:
        assert became(lambda: "0/4" in out.getvalue() and "ranks 0-1: starting" in out.getvalue())
        for rank in (0, 1):
            run.write_status(status(rank, "compiling 0/0"))
        assert became(lambda: "1/4" in out.getvalue() and "compiling 0/0" in out.getvalue())
        progress.show(LINE)
    assert f"{LINE}\n" in out.getvalue()


@pytest.mark.parametrize(
    ("statuses", "ended"),
    [
        ([status(0, phase="C/steady")], 0),  # the other has not started
        ([status(0, phase="C/steady"), status(1, phase="C/first")], 1),
        ([status(0, phase="C/localise"), status(1, phase="C/localise")], 0),  # not known: the bar stays where it is
        ([status(0, "finished", phase="verdict"), status(1, phase="verdict")], 3),
        ([status(0, "finished", phase="verdict"), status(1, "finished", phase="verdict")], 4),
    ],
)
def test_a_phase_counts_when_the_slowest_rank_has_ended_it(statuses: list[RankStatus], ended: int) -> None:
    assert num_ended(statuses, 2, PHASES) == ended


def test_a_status_file_that_is_damaged_costs_the_line_and_not_the_run(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path), io.StringIO()
    run.write_text("rank_0/status.json", "{")
    with Progress(run, 2, Console(file=out), every_s=0.01):
        assert became(lambda: "starting" in out.getvalue())
