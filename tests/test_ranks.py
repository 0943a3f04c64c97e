"""The rank runner itself: a failing rank is named with its traceback, a silent one is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_server
from tests.rank_jobs import run_on_ranks
from tpcompile.pytest_plugin.session import HAS_ENDED, Running


def _one_fails_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven of nine")
    dist.all_reduce(torch.ones(1))


def _sleeps() -> None:
    time.sleep(600)


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*_one_fails_while_the_other_waits.*seven of nine"):
        run_on_ranks(_one_fails_while_the_other_waits)


def test_ranks_that_do_not_finish_are_killed_and_named() -> None:
    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not finish"):
        run_on_ranks(_sleeps, timeout_s=1)
    assert time.monotonic() - started_s < 30


class _RankZeroConnectsLate:
    """A function of ranks: when it began on this rank, and when this rank was connected."""

    def __init__(self) -> None:
        self.connected_s = 0.0

    def __setstate__(self, state: object) -> None:
        """In the process of a rank, before it connects."""
        init = dist.init_process_group

        def late(*args: Any, rank: int, **options: Any) -> None:
            init(*args, rank=rank, **options)
            time.sleep(0 if rank else 0.5)
            self.connected_s = time.monotonic()

        dist.init_process_group = late

    def __getstate__(self) -> object:
        return "anything but None, or __setstate__ is not called"

    def __call__(self) -> tuple[float, float]:
        return self.connected_s, time.monotonic()


def test_no_rank_begins_before_all_are_connected() -> None:
    (connected_s, _), (_, begun_s) = run_on_ranks(_RankZeroConnectsLate())
    assert begun_s >= connected_s  # a rank that is done at once would end while rank 0 still connects to it


def _trace_files() -> int:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    dist.barrier()
    return len(list(Path(os.environ["TORCH_TRACE"]).glob("*_rank_*")))


def test_forked_ranks_have_the_variables_of_now_and_write_the_trace_they_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_on_ranks(len, "") == [0, 0]  # the process that they come from has started
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    assert run_on_ranks(_trace_files) == [2, 2]


@pytest.fixture
def ended() -> Running:
    """A connection to a server that has ended."""
    return Running("tpcompile-of-no-session", "")


def test_ranks_are_not_started_by_a_server_that_has_ended(ended: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(connect=lambda: ended)
    monkeypatch.setattr(rank_server.launcher, "start_server", lambda _config: server)
    with pytest.raises(RuntimeError, match=f"no rank can be started: {HAS_ENDED}"):
        run_on_ranks(len, "")


def test_the_end_of_the_server_is_not_taken_for_the_end_of_a_rank(ended: Running) -> None:
    process = rank_server.Call(len, args=("",))
    process._running = ended
    with pytest.raises(RuntimeError, match=HAS_ENDED):
        process.exitcode  # noqa: B018
