"""A client of the job's store can have no rank touch a file, nor end its sentinel, by what it writes there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.forked import ROOT, torchrun
from tests.ranks.messages import STATE
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.ranks.liveness import this_host
from tpcompile.ranks.run_dir import agreed_run_dir
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel.blackbox import absences
from tpcompile.sentinel.events import Asked, Event
from tpcompile.sentinel.listener import Listener
from tpcompile.sentinel.log_entries import Ask
from tpcompile.sentinel.store_log import StoreLog

GONE = 2**22 + 1
"""No process of Linux has this number."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "differs"])
def test_a_forged_process_and_run_directory_touch_no_file_of_others(how: str, tmp_path: Path) -> None:
    victim, foreign = tmp_path / "victim", tmp_path / "foreign"
    kept = "Fatal Python error: Aborted"
    victim.write_text(kept)
    job = tmp_path / "job"
    job.mkdir()
    done = torchrun([ROOT / "tests/sentinel/forging.py", how, victim, foreign], cwd=job)
    assert done.returncode == 1, done.stderr
    assert victim.read_text() == kept
    assert not foreign.exists()
    if how == "differs":
        (run,) = job.glob("runs/*-sentinel-*")
        assert [found.cause for found in RunDir.open(run).read_verdict().divergences] == [Cause.PYTHON_VALUE]
        assert len(RunDir.open(run).read_records()) == 2
    else:
        assert "here/1" in done.stderr, done.stderr


@pytest.fixture
def shared() -> dist.Store:
    return dist.HashStore()


def log_of(rank: int, shared: dist.Store) -> StoreLog:
    return StoreLog(lambda: RankStore(shared, rank=rank, world_size=3), [0, 1], domain="tp 0-1", number=0)


@pytest.fixture
def log(shared: dist.Store) -> StoreLog:
    """Of rank 0; rank 2 is of a different domain."""
    return log_of(0, shared)


@pytest.fixture
def forge(shared: dist.Store) -> Any:
    """What a client writes at a key of the domain, or of all domains: their processes."""

    def forged(key: str, value: Any) -> None:
        is_of_all = key.startswith(("here/", "run_dir"))
        store = dist.PrefixStore("waiting/0" if is_of_all else "tp 0-1/0", shared)
        store.set(key, value if isinstance(value, str) else json.dumps(value))

    return forged


@pytest.mark.parametrize("name", ["../victim", "/victim", "victim", "0123456789abcde", "0123456789abcdef\n", 7, ["x"]])
def test_a_black_box_is_no_path(name: Any, log: StoreLog, forge: Any) -> None:
    here = {"pid": GONE, "host": this_host(), "main_thread": 1}
    forge("here/1", {**here, "black_box": "0123456789abcdef"})
    assert absences(log, [1])[1].how == "dead"  # the control
    forge("here/1", {**here, "black_box": name})
    assert absences(log, [1])[1].how == "unknown"


@pytest.mark.parametrize("pid", [-1, 2**31, 10**30, "1", None])
def test_a_process_is_one_that_can_be(pid: Any, log: StoreLog, forge: Any) -> None:
    forge("here/1", {"pid": pid, "host": this_host(), "black_box": "", "main_thread": 1})
    assert absences(log, [1])[1].how in ("unknown", "alive")


FORGED = [
    "/etc", "../../etc", {"path": "/etc"}, {"stamp": "../../../../etc", "number": 1}, {"stamp": "", "number": 1},
    {"stamp": "20260101T000000-0a1b/../../x", "number": 1}, {"stamp": "20260101T000000-0a1b\n", "number": 1},
    {"stamp": "20260101T000000-0a1b", "number": 0}, {"stamp": "20260101T000000-0a1b", "number": "/etc"},
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_a_run_directory_is_below_that_of_this_rank(forged: Any, log: StoreLog, forge: Any, tmp_path: Path) -> None:
    forge("run_dir", forged)
    default = log.run_dir(None)
    assert default.parts[0] == "runs" and len(default.parts) == 2 and "-sentinel-" in default.name
    assert log.run_dir(tmp_path / "mine") == tmp_path / "mine"


def test_all_ranks_agree_on_a_run_directory(shared: dist.Store, tmp_path: Path) -> None:
    logs = [log_of(rank, shared) for rank in (1, 0)]
    assert len({log.run_dir(None) for log in logs}) == 1
    RunDir.create(tmp_path / "mine").write_text("verdict.json", "{}")
    stores = [RankStore(dist.PrefixStore("taken", shared), rank=rank, world_size=2) for rank in (1, 0)]
    assert agreed_run_dir(stores[0], "sentinel", tmp_path / "mine") == tmp_path / "mine-2"
    RunDir.create(tmp_path / "mine-2").write_text("rank_1/record.json", "{}")  # of the first rank, which was faster
    assert agreed_run_dir(stores[1], "sentinel", tmp_path / "mine") == tmp_path / "mine-2"


@pytest.fixture
def heard(log: StoreLog) -> Iterator[list[Event]]:
    """Events of a listener that runs until rank 0 leaves."""
    events: list[Event] = []
    listener = Listener(log, events.append)
    listener.start()
    yield events
    log.leave(STATE.model_copy(update={"rank": 0, "ended": "raised"}), has_heard=listener.has_ended)
    listener.close()


ENTRIES = [
    "{", [], {"kind": "unknown", "rank": 1}, {"kind": "ask", "rank": 1}, {"kind": "ask", "rank": 7, "number": 1},
    {"kind": "ask", "rank": 2, "number": 1}, {"kind": "ask", "rank": 1, "number": -1},
    {"kind": "left", "rank": 1, "ranks": 7}, {"kind": "passed", "rank": 1, "position": {}},
    {"kind": "alarm", "rank": 1, "alarm": {"key": "problem", "gone": [9]}}, {"kind": "degraded", "rank": 1, "why": 1},
]  # fmt: skip
"""Not JSON, not an entry, without a part, of a rank that the job or the domain does not have, for a different rank."""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_entry_that_is_not_valid_is_left_out_and_the_next_one_is_heard(
    heard: list[Event], log: StoreLog, shared: dist.Store, forge: Any
) -> None:
    for number, entry in enumerate(ENTRIES, start=1):
        dist.PrefixStore("tp 0-1/0", shared).add("events", 1)
        forge(f"event/{number}", entry)
    log_of(1, shared).append(Ask, number=3)
    waited = threading.Event()
    for _ in range(500):
        if heard:
            break
        waited.wait(0.02)
    assert heard == [Asked(1, 3)]


def test_a_state_that_is_not_valid_is_no_answer_and_nothing_waits_for_it(log: StoreLog, forge: Any) -> None:
    forge("state/1/1", {**STATE.model_dump(mode="json"), "rank": 0})
    assert log.answers(1, [1], timeout_s=100) == {}
    forge("called/1", {"ran": {"step": {"region": 1}}})
    assert log.called_on([1]) == {}
    forge("more/1/1", [])
    assert log.more_of(1, 1) is None


def test_other_keys_that_are_not_valid_are_as_if_not_written(log: StoreLog, shared: dist.Store, forge: Any) -> None:
    for key in ("raised", "closed/1", "terminated/1", "failed/1"):
        forge(key, {"rank": 1})
    assert log.first_raised() is None and log.raises_first()
    assert not log.has_closed(1) and log.terminated_at(1) is None and log.failed([1]) == {}
    dist.PrefixStore("waiting/0", shared).set("problem", "7")
    assert log.first_problem() is None
