"""Ranks of a program: all answer, or the one that failed, died or is behind is named."""

from __future__ import annotations

import multiprocessing
import re
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpcompile.bench import worker
from tpcompile.bench.processes import ProgramFailed, RankLost, Ranks
from tpcompile.bench.worker import Task

DEAD = object()
FAILED: dict[str, Any] = {"failed": "ValueError: no weights", "is_refusal": False}


def ranks(*messages: Any, timeout_s: float = 0.0) -> Ranks:
    """What each rank sends, if not None, before it dies or says no more."""
    ours, kept = [], []
    for message in messages:
        own, theirs = Pipe()
        if message is DEAD:
            theirs.close()
        elif message is not None:
            theirs.send(message)
        kept.append(theirs)
        ours.append(own)
    processes = [SimpleNamespace(pid=None, exitcode=-9, join=lambda timeout: None, theirs=theirs) for theirs in kept]
    return Ranks("C", ours, processes, timeout_s=timeout_s)  # type: ignore[arg-type]  # no process is started


def test_answers_are_in_the_order_of_the_ranks() -> None:
    assert ranks({"ms": 1}, {"ms": 2}).answers() == [{"ms": 1}, {"ms": 2}]


def test_the_ranks_without_an_answer_are_named_with_the_step() -> None:
    with pytest.raises(RankLost) as lost:
        ranks({}, None, None).answers()
    assert (lost.value.ranks, lost.value.timed_out) == ([1, 2], True)


def test_a_step_begins_when_all_ranks_are_in_their_group() -> None:
    with pytest.raises(RankLost) as lost:
        ranks({}, None).ask("build")
    assert "group" in lost.value.place
    with pytest.raises(RankLost) as lost:
        ranks({}, {}).ask("build")
    assert (lost.value.ranks, lost.value.place) == ([0, 1], "the build")


def test_a_rank_that_hangs_shows_in_its_log_where(tmp_path: Path) -> None:
    log = tmp_path / "log"
    task = Task(program="C", settings="", environ={}, log=str(log), timeout_s=2.0, server="tests.bench.programs:hangs")
    fork = multiprocessing.get_context("fork")
    own, theirs = fork.Pipe()
    process = fork.Process(target=worker.main, args=(theirs, task, {"RANK": "0"}))
    process.start()
    ranks = Ranks("C", [own], [process], timeout_s=task.timeout_s)
    with pytest.raises(RankLost) as lost:
        ranks.answers()
    ranks.kill()
    assert lost.value.ranks == [0]
    assert re.search(r'programs\.py", line \d+ in hangs', (tmp_path / "log.rank0.log").read_text())


def test_a_rank_that_died_is_named_with_its_place_and_code() -> None:
    with pytest.raises(RankLost, match="-9") as lost:
        ranks({}, DEAD).answers()
    assert (lost.value.ranks, lost.value.timed_out) == ([1], False)


def test_a_program_whose_rank_raised_has_failed() -> None:
    with pytest.raises(ProgramFailed, match=FAILED["failed"]) as failed:
        ranks({"ms": 1}, FAILED).answers()
    assert (failed.value.rank, failed.value.is_refusal) == (1, False)


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_a_rank_that_died_is_the_cause_of_a_failure_of_its_peer(after_s: float) -> None:
    found = ranks(FAILED, None, timeout_s=9.0)
    dies = threading.Timer(after_s, found._processes[1].theirs.close)  # type: ignore[attr-defined]  # no process
    dies.start()
    with pytest.raises(RankLost) as lost:
        found.answers()
    dies.join()
    assert lost.value.ranks == [1]
