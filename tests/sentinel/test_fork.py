"""Forked children of a rank: workers of data loaders and pools are no ranks, and their end is not the job's."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sentinel import scenarios
from tpcompile.ranks.signals import SigtermPipe
from tpcompile.sentinel.block_end import BlockEnd

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def signals() -> Iterator[SigtermPipe]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    installed = SigtermPipe()
    installed.install(thread)
    yield installed
    installed.restore()
    ended.set()
    thread.join()


def terminated_child(signals: SigtermPipe, *, forgets: bool) -> int:
    """Process id of a forked child that was sent a SIGTERM."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        if forgets:
            signals.forget()
        os.write(told, b"!")
        time.sleep(30)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    return child


def test_the_end_of_a_child_is_not_taken_for_ones_own(signals: SigtermPipe) -> None:
    status = os.waitpid(terminated_child(signals, forgets=True), 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert not signals.terminated(timeout_s=0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.terminated(timeout_s=5)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio, which loguru imports, detaches every forked child")
def test_without_that_the_end_of_a_child_would_be_ones_own(signals: SigtermPipe) -> None:
    child = terminated_child(signals, forgets=False)
    assert signals.terminated(timeout_s=5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.tp(world_size=2, timeout_s=120)
def test_a_forked_worker_is_no_rank() -> None:
    found = scenarios.Scenarios().forked()
    assert found["child"] == "inactive"
    assert (found["causes"], found["active"]) == ([], True)


_KEEPER = SimpleNamespace(end=lambda how: None)


@pytest.mark.parametrize(
    ("unwinds", "is_raised", "findings", "waits"),
    [(True, False, [], 1), (False, True, [], 1), (False, False, [], 0), (True, True, ["found"], 0)],
    ids=["raises", "another raises", "nobody", "named before"],
)
def test_a_terminated_rank_does_not_end_while_a_problem_is_being_named(
    unwinds: bool, is_raised: bool, findings: list[str], waits: int
) -> None:
    """torchrun sends SIGTERM as soon as one process has died, while the others still find out why."""
    codes, waited = list[int](), list[int]()
    losses = SimpleNamespace(at_sigterm=lambda: None, interrupted=lambda: None)
    shutdown = SimpleNamespace(terminated=codes.append, exit_code=None, unwinds=unwinds)
    end: Any = SimpleNamespace(
        _progress=SimpleNamespace(is_active=True), _shutdown=shutdown, _findings=findings, _losses=losses,
        _alarms=SimpleNamespace(is_raised=is_raised), _keeper=_KEEPER, wait_for_finding=waited.append,
    )  # fmt: skip
    BlockEnd.terminated(end)
    assert (len(waited), codes) == (waits, [128 + signal.SIGTERM])


def test_a_terminated_rank_ends_although_the_store_does_not_respond() -> None:
    codes: list[int] = []

    def gone() -> None:
        raise RuntimeError("store is gone")

    ends = SimpleNamespace(terminated=codes.append, exit_code=None)
    for is_active in (True, False):
        losses = SimpleNamespace(at_sigterm=gone)
        progress = SimpleNamespace(is_active=is_active)
        end: Any = SimpleNamespace(_progress=progress, _shutdown=ends, _losses=losses, _keeper=_KEEPER)
        BlockEnd.terminated(end)
    assert codes == [128 + signal.SIGTERM] * 2
