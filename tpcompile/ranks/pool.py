"""Top-level function -> its result on each of N gloo ranks of this machine, with a time limit."""

from __future__ import annotations

import functools
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tpcompile.ranks import starts
from tpcompile.ranks.env import hosted_store, local_variables
from tpcompile.ranks.starts import Call, ExitCodes, Start
from tpcompile.ranks.store import RankStore

_POLL_S = 0.02
_SETTLED_S = 0.1
"""A rank that fails because a different rank died has ended so long after it: both are reported."""


def run_on_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    start_method: str | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks on this machine and return the results in rank order.

    `fn` must be importable from a different process (top level of a module); results must pickle. The default group
    exists while it runs; a collective gives up after `collective_timeout_s`, None waits as long as the job. Each rank
    has one CPU thread, torchrun's variables, and a store at MASTER_ADDR and MASTER_PORT that outlives it.

    In a pytest session with the plugin of this package, ranks are forked from the session's server, which has imported
    torch. Elsewhere, or with `start_method="spawn"`, each rank imports torch itself, which takes about ten seconds: do
    many checks in one call, or import torch once for all calls, with
    `multiprocessing.set_forkserver_preload(["torch", ...])` and `start_method="forkserver"`.

    Raises RuntimeError with the rank and the traceback of the first that failed, TimeoutError with the ranks still
    running when time is up; both after killing every rank.
    """
    limit_s = timeout_s if collective_timeout_s is None else collective_timeout_s
    start = _start(start_method)
    with tempfile.TemporaryDirectory(prefix="tpcompile-ranks-") as name:
        folder = Path(name)
        call = Call(fn=fn, args=args, world_size=world_size, collective_timeout_s=limit_s, folder=folder)
        with start(call) as exit_codes:
            _wait(exit_codes, time.monotonic() + timeout_s)
            _raise_first_failure(exit_codes(), folder)
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(world_size)]


def _start(start_method: str | None) -> Start:
    registered = starts.registered()
    if start_method is None and registered is not None:
        return registered
    return functools.partial(spawned, start_method=start_method or "spawn")


def _wait(exit_codes: ExitCodes, deadline_s: float) -> None:
    """Return when all ranks have ended or one has failed."""
    codes = exit_codes()
    while None in codes and not any(codes):
        if time.monotonic() > deadline_s:
            alive = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {alive} did not finish in time")
        time.sleep(_POLL_S)
        codes = exit_codes()
    has_failed = any(codes)
    if has_failed:
        time.sleep(_SETTLED_S)


def _raise_first_failure(exit_codes: list[int | None], folder: Path) -> None:
    """Ranks that died are named first: they cannot have failed because of a rank that raised."""
    dead: dict[int, int] = {}
    by_time: dict[int, int] = {}
    for rank, code in enumerate(exit_codes):
        if not code:
            continue
        error = _error(folder, rank)
        if error.exists():
            by_time[error.stat().st_mtime_ns] = rank
        else:
            dead[rank] = code
    causes = []
    if dead:
        causes.append(f"ranks died without a traceback, exit codes {dead}")
    if by_time:
        # The first is the cause: a peer that lost its connection fails after it.
        rank = by_time[min(by_time)]
        text = _error(folder, rank).read_text()
        causes.append(f"rank {rank} failed:\n{text}")
    if causes:
        raise RuntimeError("\n".join(causes))


# Spawned ranks


@contextmanager
def spawned(call: Call, *, start_method: str = "spawn") -> Iterator[ExitCodes]:
    """Start the ranks of a call by multiprocessing."""
    context = mp.get_context(start_method)
    # It listens from here on; the store has threads, and comes after ranks that may be forked.
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    variables = [local_variables(rank, call.world_size, port) for rank in range(call.world_size)]
    processes = [
        context.Process(target=_run_spawned, args=(call, rank, own), daemon=True) for rank, own in enumerate(variables)
    ]
    store = None
    try:
        for process in processes:
            process.start()
        store = hosted_store(listener)
        yield lambda: [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        listener.close()
        del store


def _run_spawned(call: Call, rank: int, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    code = run_rank(call, rank)
    if code:
        os._exit(code)


# In the process of a rank


def run_rank(call: Call, rank: int) -> int:
    """Run a call on this rank, which has torchrun's variables, and write the result or the traceback.

    Returns the exit code of the process.
    """
    torch.set_num_threads(1)
    try:
        connect(timeout_s=call.collective_timeout_s)
        result = call.fn(*call.args)
        _write(_result(call.folder, rank), lambda path: torch.save(result, path))
        dist.destroy_process_group()
    except BaseException:
        text = traceback.format_exc()
        _write(_error(call.folder, rank), lambda path: path.write_text(text))
        return 1
    return 0


def connect(*, timeout_s: float) -> None:
    """Make the default group of gloo ranks with torchrun's variables; collectives give up after `timeout_s`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    # gloo returns when this rank's own connections stand: a rank that ends at once would cut those that others still
    # make ("Connection closed by peer" in their init_process_group).
    RankStore.of_job("tpcompile/ranks").wait_for_ranks("connected", timeout_s=timeout_s)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result_{rank}"


def _error(folder: Path, rank: int) -> Path:
    return folder / f"error_{rank}"


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Under a temporary name first: the file must not be read half-written."""
    partial = path.with_name(f"partial_{path.name}")
    write(partial)
    partial.rename(path)
