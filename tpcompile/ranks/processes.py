"""Top-level function -> its result on each of N gloo ranks, in spawned processes, with a time limit."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tpcompile.ranks.store import RankStore

_POLL_S = 0.02


def run_on_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks on this machine and return the results in rank order.

    `fn` must be importable from a spawned process (top level of a module); results must pickle. The default group
    exists while it runs; a collective gives up after `collective_timeout_s`, None waits as long as the job. Each rank
    has one CPU thread. Starting costs seconds (the imports of every rank), so do many checks in one call, or import
    torch once for all calls: with `multiprocessing.set_forkserver_preload(["torch", ...])` and
    `start_method="forkserver"`.

    Raises RuntimeError with the rank and the traceback of the first that failed, TimeoutError with the ranks still
    running when time is up; both after killing every rank.
    """
    return run_in(
        mp.get_context(start_method),
        fn,
        args,
        world_size=world_size,
        timeout_s=timeout_s,
        collective_timeout_s=collective_timeout_s,
    )


def run_in(
    context: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    world_size: int = 2,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
) -> list[Any]:
    """`run_on_ranks`, with a context of multiprocessing that starts the ranks."""
    limit_s = timeout_s if collective_timeout_s is None else collective_timeout_s
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_entry, args=(rank, world_size, folder, limit_s, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, time.monotonic() + timeout_s)
            _raise_first_failure(processes, Path(folder))
            return [torch.load(Path(folder, f"result_{rank}"), weights_only=False) for rank in range(world_size)]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _wait(processes: list[Any], deadline_s: float) -> None:
    """Return when all ranks have ended or one has failed."""
    while not _have_ended(processes):
        if time.monotonic() > deadline_s:
            alive = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            raise TimeoutError(f"ranks {alive} did not finish in time")
        time.sleep(_POLL_S)


def _have_ended(processes: list[Any]) -> bool:
    exit_codes = [process.exitcode for process in processes]
    return None not in exit_codes or any(exit_codes)


def _raise_first_failure(processes: list[Any], folder: Path) -> None:
    # The first failure is the cause; a peer that lost its connection fails after it.
    errors = sorted(folder.glob("error_*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RuntimeError(f"rank {errors[0].name.removeprefix('error_')} failed:\n{errors[0].read_text()}")
    dead = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    if dead:
        raise RuntimeError(f"ranks died without a traceback, exit codes {dead}")


def _entry(
    rank: int, world_size: int, folder: str, limit_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder, "store")), world_size)
        limit = timedelta(seconds=limit_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        # gloo returns when this rank's own connections stand: a rank that ends at once would cut those that others
        # still make ("Connection closed by peer" in their init_process_group).
        connected = RankStore(dist.PrefixStore("run_on_ranks", store), rank=rank, world_size=world_size)
        connected.wait_for_ranks("connected", timeout_s=limit_s)
        partial = Path(folder, f"partial_{rank}")
        torch.save(fn(*args), partial)
        partial.rename(Path(folder, f"result_{rank}"))
        dist.destroy_process_group()
    except BaseException:
        # Written under a temporary name first: the file must not be read half-written.
        partial = Path(folder, f"failing_{rank}")
        partial.write_text(traceback.format_exc())
        partial.rename(Path(folder, f"error_{rank}"))
        os._exit(1)
