"""One server of forks for all pytest workers: the first that needs it starts it, it ends with the last of them.

A server takes some 10 s of CPU time to import torch; multiprocessing starts one in each process that asks for a fork.
"""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.spawn import get_executable
from pathlib import Path

PRELOADED = ["tests.preloaded", "tests.adapters.preloaded"]


def share(folder: Path) -> None:
    """From now on this process forks from the server of `folder`, which is the same for all workers of a session."""
    fifo = folder / "alive"
    with suppress(FileExistsError):
        os.mkfifo(fifo)
    server = forkserver._forkserver
    # Open for both: a process that is alone at its end does not wait for a reader.
    server._forkserver_alive_fd = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)

    def ensure_running() -> None:
        resource_tracker.ensure_running()
        if server._forkserver_address is None:
            server._forkserver_address = _address(folder)

    server.ensure_running = ensure_running


def _address(folder: Path) -> str:
    """Where the server listens; it is started if no worker has yet."""
    written = folder / "address"
    with _locked(folder):
        if not written.exists():
            written.write_text(_start(folder / "alive"))
        return written.read_text()


def _start(fifo: Path) -> str:
    """What `multiprocessing.forkserver` does, with a pipe that other processes can open."""
    with socket.socket(socket.AF_UNIX) as listener:
        # Of Linux, without a file: multiprocessing's is gone with the process that started the server.
        address = f"\0tpcompile-tests-{uuid.uuid4().hex}"
        listener.bind(address)
        listener.listen(128)
        alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        command = f"from multiprocessing.forkserver import main; main({listener.fileno()}, {alive}, {PRELOADED!r})"
        flags = util._args_from_interpreter_flags()
        util.spawnv_passfds(get_executable(), [get_executable(), *flags, "-c", command], [listener.fileno(), alive])
        os.close(alive)
    return address


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
