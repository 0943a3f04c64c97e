"""The rank runner itself: a failing rank is named with its traceback, a silent one is killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tpcompile.ranks import env, pool
from tpcompile.ranks.env import hosted_store, rank_env
from tpcompile.ranks.pool import Call, ExitCodes
from tpcompile.ranks.store import RankStore
from tpcompile.testing import run_on_ranks


def _one_fails_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven of nine")
    dist.all_reduce(torch.ones(1))


def _sleeps(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*_one_fails_while_the_other_waits.*seven of nine"):
        run_on_ranks(_one_fails_while_the_other_waits)


def test_ranks_that_do_not_finish_are_killed_and_named_with_their_lines(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not finish") as caught:
        run_on_ranks(_sleeps, str(tmp_path), timeout_s=1)
    line = f"{__file__}:{_sleeps.__code__.co_firstlineno + 2} in _sleeps"
    assert caught.value.__notes__ == [f"rank {rank} is at {line}" for rank in range(2)]
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


def _connects_again(port: int) -> tuple[float, float]:
    """When this rank was connected through that store, rank 0 later than rank 1, and when it went on."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    init, connected_s = dist.init_process_group, []

    def late(*args: Any, **options: Any) -> None:
        init(*args, **options)
        time.sleep(0 if dist.get_rank() else 0.5)
        connected_s.append(time.monotonic())

    dist.init_process_group = late
    pool.connect(timeout_s=60)
    return connected_s[0], time.monotonic()


def test_no_rank_begins_before_all_are_connected() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (connected_s, _), (_, begun_s) = run_on_ranks(_connects_again, store.port)
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


class _CannotBePickled:
    def __reduce__(self) -> str:
        raise TypeError("planted in __reduce__")


def test_a_result_that_cannot_be_pickled_names_the_rank() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank [01] failed:.*planted in __reduce__"):
        run_on_ranks(_CannotBePickled)


def test_a_function_that_cannot_be_pickled_is_refused_before_any_rank_starts() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        run_on_ranks(lambda: None)


def _one_is_killed_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_is_killed_is_named_before_the_one_that_lost_it() -> None:
    with pytest.raises(RuntimeError, match=r"^ranks died without a traceback, exit codes \{1: -9\}"):
        run_on_ranks(_one_is_killed_while_the_other_waits)


def _printed() -> None:
    print("rank", dist.get_rank(), "says")


def test_output_is_printed_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(_printed)
    assert capsys.readouterr().out == "[rank 0] rank 0 says\n[rank 1] rank 1 says\n"


def _store_of_the_job() -> tuple[str, int]:
    store = RankStore.of_job("test")
    store.put(f"from {store.rank}", store.rank)
    if store.rank == 0:
        assert store.get("from 1", int, timeout_s=60) == 1
    variables = rank_env()
    return f"{variables.rank} of {variables.world_size}", os.getppid()


@pytest.mark.parametrize("start_method", [None, "spawn"])
def test_ranks_have_torchruns_variables_and_store_forked_by_one_supervisor_or_spawned_by_this_process(
    start_method: str | None,
) -> None:
    texts, parents = zip(*run_on_ranks(_store_of_the_job, start_method=start_method), strict=True)
    assert texts == ("0 of 2", "1 of 2")
    assert len(set(parents)) == 1
    assert (parents[0] == os.getpid()) is (start_method == "spawn")


@contextmanager
def _start_nothing(call: Call) -> Iterator[ExitCodes]:
    torch.save("of no rank", call.folder / "result_0")
    yield lambda: [0]


def test_a_registered_start_is_used_until_that_is_undone() -> None:
    undo = pool.register(_start_nothing)
    try:
        assert run_on_ranks(len, "", world_size=1) == ["of no rank"]
    finally:
        undo()
    assert run_on_ranks(len, "", world_size=1) == [0]


def _parent() -> int:
    return os.getppid()


def test_the_store_is_hosted_after_the_ranks_were_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread looks up the address of a client; a rank that is forked then waits for that lock for ever."""
    children = []

    def hosted(listener: socket.socket) -> object:
        children.append(len(multiprocessing.active_children()))
        return hosted_store(listener)

    monkeypatch.setattr(env, "hosted_store", hosted)
    run_on_ranks(_parent, start_method="fork")
    assert children == [2]
