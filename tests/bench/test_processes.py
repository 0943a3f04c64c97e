"""Ranks of a program: all answer, or the one that failed, died or is behind is named."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Mapping
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


def ranks(*messages: list[Any], hears: Callable[[str], None] = lambda place: None) -> Ranks:
    """What each rank sends, before it dies or says no more; the limit is over at once."""
    ours, kept = [], []
    for sent in messages:
        own, theirs = Pipe()
        for message in sent:
            if message is not DEAD:
                theirs.send(message)
        if DEAD in sent:
            theirs.close()
        kept.append(theirs)
        ours.append(own)
    processes = [SimpleNamespace(pid=None, exitcode=-9, join=lambda timeout: None, theirs=theirs) for theirs in kept]
    return Ranks("C", ours, processes, timeout_s=0.0, at=hears)  # type: ignore[arg-type]  # no process is started


def at(place: str) -> Mapping[str, str]:
    return {"at": place}


def test_answers_are_in_the_order_of_the_ranks() -> None:
    assert ranks([at("build"), {"ms": 1}], [{"ms": 2}]).answers() == [{"ms": 1}, {"ms": 2}]


def test_a_rank_that_is_behind_the_others_is_named_first() -> None:
    with pytest.raises(RankLost) as lost:
        ranks([at("build"), at("first call")], [at("build")]).answers()
    assert lost.value.timed_out
    assert list(lost.value.places.items()) == [(1, "build"), (0, "first call")]


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
    assert lost.value.places == {0: "its nap"}
    assert re.search(r'programs\.py", line \d+ in hangs', (tmp_path / "log.rank0.log").read_text())


def test_a_rank_that_died_is_named_with_its_place_and_code() -> None:
    with pytest.raises(RankLost, match="-9") as lost:
        ranks([at("build")], [at("build"), DEAD]).answers()
    assert (lost.value.places, lost.value.timed_out) == ({1: "build"}, False)


def test_a_program_whose_rank_raised_has_failed() -> None:
    with pytest.raises(ProgramFailed, match=FAILED["failed"]) as failed:
        ranks([{"ms": 1}], [FAILED]).answers()
    assert (failed.value.rank, failed.value.is_refusal) == (1, False)


def test_a_rank_that_died_is_the_cause_of_a_failure_of_its_peer() -> None:
    with pytest.raises(RankLost) as lost:
        ranks([FAILED], [DEAD]).answers()
    assert list(lost.value.places) == [1]


def test_a_place_is_heard_when_all_ranks_are_there() -> None:
    heard: list[str] = []
    at_first = [at("build"), at("first call"), {"ms": 1}]
    ranks(at_first, [at("build"), {"ms": 2}], hears=heard.append).answers()
    assert heard == ["build"]
