"""The job's store where no torchrun agent serves one: a process beside rank 0, which may outlive it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from threading import Thread
from typing import NoReturn

import torch.distributed as dist

from tpcompile.errors import PreflightError
from tpcompile.node import has_agent
from tpcompile.ranks.env import RankEnv
from tpcompile.ranks.store import RankStore

_GRACE_S = 15.0
"""How long the store outlives a rank 0 that died: the ranks that report it need the store."""
_POLL_S = 0.2


@contextmanager
def served_store(env: RankEnv, *, timeout_s: float) -> Iterator[None]:
    """A store at MASTER_ADDR and MASTER_PORT for the job, served from rank 0 unless a torchrun agent serves one.

    Must be entered before this process has threads: it forks. Raises PreflightError when the port is taken, on the
    other ranks when there is no store within `timeout_s`.
    """
    if has_agent():
        yield
        return
    if env.rank == 0:
        _fork_server(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), env.world_size)
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"})
    store = _find_store(env, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timeout_s)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the store may have ended before this rank
            store.put(f"left/{env.rank}", True)


def _find_store(env: RankEnv, place: str, timeout_s: float) -> RankStore:
    """This rank's client. Raises PreflightError when there is no store, or a server that never answers."""
    found: Queue[RankStore | RuntimeError] = Queue()

    def connect() -> None:
        try:
            found.put(RankStore.connect("served", rank=env.rank, world_size=env.world_size, timeout_s=timeout_s))
        except RuntimeError as error:
            found.put(error)

    # A thread: torch waits without a limit for a server that takes the connection and never answers.
    Thread(target=connect, daemon=True).start()
    try:
        store = found.get(timeout=timeout_s)
    except Empty:
        store = RuntimeError(f"no answer within {timeout_s:g} s")
    if isinstance(store, RuntimeError):
        raise PreflightError(f"rank {env.rank} finds no store at {place}, where rank 0 serves it: {store}")
    return store


def _fork_server(host: str, port: int, world_size: int) -> None:
    """Return when the child serves the store."""
    read, write = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        os.close(read)
        _serve(host, port, world_size, parent, write)
    os.close(write)
    with os.fdopen(read) as said:
        problem = said.read()
    if problem:
        raise PreflightError(f"rank 0 cannot serve the job's store at {host}:{port}: {problem}; set MASTER_PORT")


def _serve(host: str, port: int, world_size: int, parent: int, report: int) -> NoReturn:
    """Serve in the child until all ranks have left, or until the grace after the parent's end is over."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)  # a launcher waits for the output of a task to end
    try:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        os.write(report, str(error).splitlines()[0].encode())
        os._exit(1)
    os.close(report)
    left = [f"served/left/{rank}" for rank in range(world_size)]
    deadline = None
    while not store.check(left) and (deadline is None or time.monotonic() < deadline):
        if deadline is None and os.getppid() != parent:
            deadline = time.monotonic() + _GRACE_S
        time.sleep(_POLL_S)
    os._exit(0)
