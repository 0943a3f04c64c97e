"""Calls in forked processes: how each of them ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from tpcompile.ranks.children import as_they_end, in_children


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def spins() -> None:
    while True:
        pass


def raises() -> None:
    raise KeyError("x")


def test_a_failure_in_a_child_is_reported_and_the_other_children_continue() -> None:
    calls = [partial(int, "7"), crashes, spins, raises, partial(int, "8")]
    started = time.monotonic()
    counts: list[int] = []
    seven, crash, endless, error, eight = in_children(calls, jobs=2, cpu_s=1, on_end=counts.append)
    assert counts == [1, 2, 3, 4, 5]
    assert (seven.result, eight.result) == (7, 8) and time.monotonic() - started < 30
    assert crash.failure.endswith(f"status -{signal.SIGSEGV}")
    assert "not end" in endless.failure
    assert error.failure == "KeyError: 'x'"


def sleeps() -> None:
    time.sleep(60)


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_children_that_still_run_are_ended_with_the_loop_over_them() -> None:
    calls = as_they_end([os.getpid, sleeps, sleeps], jobs=3, cpu_s=5, clock_s=50)
    number, first = next(calls)
    children = [child.pid for child in multiprocessing.active_children()]
    calls.close()
    assert (number, runs(first.result)) == (0, False)
    assert len(children) == 2 and not any(runs(pid) for pid in children)


def test_a_result_outlives_its_child() -> None:
    (found,) = in_children([partial(torch.arange, 3)], jobs=1, cpu_s=5)
    assert found.result.tolist() == [0, 1, 2]
