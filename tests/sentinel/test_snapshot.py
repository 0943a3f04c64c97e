"""A main thread that waits for its GPU behind a receive of NCCL, which has returned: no frame of torch says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tpcompile.sentinel import snapshot
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.torch_api import watching
from tpcompile.torch_api.point_to_point import Messages, Posted

HELD_AFTER_S = 0.02


@pytest.fixture(autouse=True)
def one_message(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A process whose GPU has work behind one receive, which has been in flight for a minute."""
    received = {
        "is_p2p": True, "profiling_name": "nccl:recv 0<-1", "state": "scheduled", "retired": False,
        "process_group": ("0", "default_pg"), "frames": [], "time_created_ns": time.time_ns() - 60 * 10**9,
    }  # fmt: skip
    monkeypatch.setattr(watching, "recorded_collectives", lambda: {"entries": [received]})
    monkeypatch.setattr(watching, "group_members", lambda: {"0 default_pg": (0, 1)})
    monkeypatch.setattr(watching, "has_gpu_work", lambda: True)
    monkeypatch.setattr(snapshot, "_STILL_S", HELD_AFTER_S)
    return received


@pytest.fixture
def waiting() -> Iterator[Snapshot]:
    """The snapshot of a thread that stays where it is, in none of torch's calls."""
    goes_on, thread_has_begun = threading.Event(), threading.Event()

    def stays() -> None:
        thread_has_begun.set()
        goes_on.wait()

    thread = threading.Thread(target=stays)
    thread.start()
    thread_has_begun.wait()
    yield snapshot_of(thread)
    goes_on.set()
    thread.join()


def snapshot_of(thread: threading.Thread) -> Snapshot:
    protocol: Any = SimpleNamespace(rank=0, progress=Progress(lambda _: None), waits_at=lambda: None)
    assert thread.ident is not None
    return Snapshot(protocol, Messages(), main_thread=thread.ident)


def is_held(looking: Snapshot) -> bool:
    """The answer of the second of two looks."""
    looking.is_stuck(for_s=3.0)
    time.sleep(2 * HELD_AFTER_S)
    state = looking.state()
    assert looking.is_stuck(for_s=3.0) == state.blocked == (state.p2p is not None)
    return state.blocked


def test_a_thread_that_does_not_move_waits_in_the_message_before_its_gpus_work(waiting: Snapshot) -> None:
    assert not waiting.is_stuck(for_s=3.0), "one look does not say that a thread does not move"
    assert is_held(waiting)
    p2p = waiting.state().p2p
    assert p2p is not None and (p2p.op, p2p.peer) == ("recv", 1)


def test_what_it_has_posted_behind_that_message_is_queued(waiting: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"peer": 1, "number": 1, "num_elements": 1, "dtypes": "float32", "stack": ()}
    posted = [Posted(op="recv", at_ns=2, **fields), Posted(op="send", at_ns=3, **fields)]
    monkeypatch.setattr(Messages, "posted", lambda _: posted)
    assert is_held(waiting)
    assert [one.is_queued for one in waiting.state().messages] == [False, True]


def test_a_gpu_that_has_done_its_work_holds_nothing(waiting: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that was posted ahead, while the program does something else for long."""
    monkeypatch.setattr(watching, "has_gpu_work", lambda: False)
    assert not is_held(waiting)


@pytest.mark.parametrize(
    "fields", [{"state": "completed"}, {"time_created_ns": 2 * time.time_ns()}], ids=["done", "new"]
)
def test_a_message_that_is_done_or_new_holds_nothing(
    waiting: Snapshot, one_message: dict[str, Any], fields: dict[str, Any]
) -> None:
    one_message.update(fields)
    assert not is_held(waiting)


def test_a_thread_that_has_moved_since_the_last_look_is_not_held() -> None:
    steps, arrived = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def moves() -> None:
        arrived[0].set()
        steps[0].wait()
        arrived[1].set()
        steps[1].wait()

    thread = threading.Thread(target=moves)
    thread.start()
    looking = snapshot_of(thread)
    found = []
    for step, has_arrived in zip(steps, arrived, strict=True):
        has_arrived.wait()
        time.sleep(2 * HELD_AFTER_S)  # from the event to the wait behind it
        found.append(looking.is_stuck(for_s=3.0))
        step.set()
    thread.join()
    assert found == [False, False]
