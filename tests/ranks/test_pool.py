"""The rank runner itself: a failing rank is named with its traceback, a silent one is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import forked
from tests.forked import became, runs
from tpcompile.process_tree import sweep
from tpcompile.pytest_plugin.files import Job
from tpcompile.ranks import env, pool
from tpcompile.ranks.env import hosted_store, rank_env
from tpcompile.ranks.pool import Call, ExitCodes, ForkedRanks
from tpcompile.ranks.store import RankStore
from tpcompile.testing import run_on_ranks

_WHY = "seven of nine"


def _one_fails_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError(_WHY)
    dist.all_reduce(torch.ones(1))


def _sleeps(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    for pid in (os.getpid(), child.pid):
        Path(folder, str(pid)).touch()
    time.sleep(600)


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)rank 1 failed:.*_one_fails_while_the_other_waits.*{_WHY}"):
        run_on_ranks(_one_fails_while_the_other_waits)


@pytest.mark.parametrize("start_method", [None, "fork"])
def test_ranks_that_do_not_finish_are_killed_with_their_children_and_named_with_their_lines(
    tmp_path: Path, start_method: str | None
) -> None:
    """They ignore SIGTERM."""
    with pytest.raises(TimeoutError, match=r"\[0, 1\]") as caught:
        run_on_ranks(_sleeps, str(tmp_path), timeout_s=1.5, start_method=start_method)
    line = f"{__file__}:{_sleeps.__code__.co_firstlineno + 5} in _sleeps"
    notes = [f"rank {rank} is at {line}" for rank in range(2)]
    assert getattr(caught.value, "__notes__", []) == ([] if start_method else notes)
    assert len(pids_in(tmp_path)) == 4
    assert became(lambda: not any(map(runs, pids_in(tmp_path))))


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def _waits(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def supervise(job: Job, _rank: int, _variables: Mapping[str, str]) -> None:
    """Starts ranks that sleep; `is_bound` to this process or, as a control, not."""
    tempfile.tempdir = job.folder
    if not job.arguments["is_bound"]:
        pool.end_with_parent = lambda: None
    if job.arguments["is_spawned"]:
        run_on_ranks(_waits, job.folder, start_method="fork")
    ranks = ForkedRanks(2, lambda rank, variables: _waits(job.folder))
    while ranks.running:
        ranks.wait(timeout_s=60)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
@pytest.mark.parametrize("is_spawned", [True, False])
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_process_that_is_killed_leaves_none_of_its_ranks(tmp_path: Path, is_bound: bool, is_spawned: bool) -> None:
    how = {"is_bound": is_bound, "is_spawned": is_spawned}
    with forked.start(f"{__name__}:supervise", tmp_path, how) as running:
        assert became(lambda: len(pids_in(tmp_path)) == 2)
        (supervisor,) = running.pids
        os.kill(supervisor, signal.SIGKILL)
        try:
            assert became(lambda: not any(map(runs, pids_in(tmp_path))), 20 if is_bound else 1) is is_bound
        finally:
            for pid in filter(runs, pids_in(tmp_path)):
                os.kill(pid, signal.SIGKILL)


def end_one_by_one(job: Job, _rank: int, _variables: Mapping[str, str]) -> None:
    """Ranks that end by a code, a signal, an exception, and not at all: what is known of them, in order."""

    def end(rank: int, variables: Mapping[str, str]) -> int:
        subprocess.Popen(["sleep", f"600.{os.getpid()}"], start_new_session=rank == 0)
        time.sleep(0.4 * rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if rank == 2:
            raise ValueError("planted")
        if rank == 3:
            time.sleep(600)
        return 7

    ranks = ForkedRanks(4, end)
    pids = ranks.running.copy()
    ended: list[tuple[int, int]] = []
    while len(ended) < 3:
        ranks.wait(timeout_s=60)
        ended += ranks.ended()
    ranks.kill()
    Path(job.folder, "ended").write_text(json.dumps([ended, pids, list(ranks.running)]))


def test_ends_are_in_order_with_their_codes_and_what_ranks_leave_in_their_group_is_killed(tmp_path: Path) -> None:
    with forked.start(f"{__name__}:end_one_by_one", tmp_path, {}) as running:
        running.is_served(60)
    ended, pids, left = json.loads((tmp_path / "ended").read_text())
    assert ended == [[0, 7], [1, -signal.SIGSEGV], [2, 70]]
    assert left == [] and "ValueError: planted" in (tmp_path / "rank_0.stderr").read_text()
    marks = {f"600.{pid}": rank for rank, pid in pids.items()}
    try:
        assert became(lambda: sleeping(marks) == ["0"])  # it has left the group: that of the others is swept
    finally:
        sweep(lambda process: process.cmdline()[-1:] != [] and process.cmdline()[-1] in marks)


def sleeping(marks: Mapping[str, str]) -> list[str]:
    """The ranks whose child with that mark runs."""
    lines = [process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])]
    return sorted(marks[line[-1]] for line in lines if line and line[-1] in marks)


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
    with pytest.raises(RuntimeError, match=r"\{1: -9\}"):
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
