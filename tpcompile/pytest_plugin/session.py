"""A pytest session -> its one server of ranks, which all its processes share and which ends with the session.

The process that the session belongs to listens at one address, and the server holds a connection to it: the end of that
process closes the connection, however it comes. The server listens at a second address; the process that binds it first
starts the server. Both are in a folder of this user alone: whoever connects there has code run.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait

import pytest

from tpcompile.errors import PreflightError
from tpcompile.private_folder import shared_folder
from tpcompile.pytest_plugin.files import Job

HAS_ENDED = "the process that ranks are forked from has ended"
_KEY = "tp_session"
"""Key of the name of the session in the `workerinput` of xdist."""
_ENDING_S = 10.0
"""The server has ended by then."""
_LISTENING_S = 1.0
"""The process that has bound an address listens at it by then."""
_POLL_S = 0.02
_CODE = """
import os, sys
os.fork() and os._exit(0)  # no child of the process that starts it: it outlives that
sys.path[:] = {path!r}
from tpcompile.pytest_plugin.server import main
main({name!r}, {listener}, {preload!r}, {plugins!r})
"""


class Session:
    """The life of a session; held by the process that it belongs to, not by the workers of xdist."""

    def __init__(self) -> None:
        """Raises PreflightError where no folder for the sockets can be private."""
        self.name = tempfile.mkdtemp(dir=shared_folder("pytest"), prefix="")
        self._listener = _bound(self.name, "session")
        self._listener.listen()

    def end(self) -> None:
        """End the server, if one was started; it ends the ranks that are left."""
        while wait([self._listener], 0):
            connection = Connection(self._listener.accept()[0].detach())
            with connection, suppress(OSError, EOFError):
                if connection.poll(_ENDING_S):
                    pid = connection.recv()
                    connection.send(None)
                    if not connection.poll(_ENDING_S):  # the server closes its end when it ends
                        os.kill(pid, signal.SIGKILL)
        self._listener.close()
        remove(self.name)


_SESSION = pytest.StashKey[Session]()
_SERVER = pytest.StashKey[tuple[str, str]]()
"""Name of the session, and why no rank can be forked."""


def name_of(config: pytest.Config) -> str:
    """Name of the session that this process is one of, or has: the folder of its sockets.

    Raises PreflightError where there can be none.
    """
    inherited = getattr(config, "workerinput", {}).get(_KEY)
    if inherited is not None:
        return str(inherited)
    if _SESSION not in config.stash:
        config.stash[_SESSION] = Session()
    return config.stash[_SESSION].name


def share_with(workerinput: dict[str, object], config: pytest.Config) -> None:
    """Let a worker of xdist on this machine use the server of this session."""
    with suppress(PreflightError):  # each worker finds the same, and reports it where a test needs ranks
        workerinput[_KEY] = name_of(config)


def end(config: pytest.Config) -> None:
    """End the server of the session of this process, if it has one."""
    if _SESSION in config.stash:
        config.stash[_SESSION].end()


def join(name: str) -> Connection:
    """Connect the server to its session, which learns the process id; the end of the session closes the connection."""
    connection = _connected(name, "session")
    connection.send(os.getpid())
    return connection


# The server


def start_server(config: pytest.Config) -> tuple[str, str]:
    """Start the server, unless this process or a different one of the session has.

    Returns the name of the session, and why no rank can be forked, as far as that is known without torch.
    """
    if _SERVER not in config.stash:
        name, why_not = "", _why_not()
        if not why_not:
            try:
                name = name_of(config)
            except PreflightError as error:
                why_not = str(error)
            else:
                _start_server(name, preload=config.getini("tp_preload"), plugins=list(config.option.plugins))
        config.stash[_SERVER] = name, why_not
    return config.stash[_SERVER]


def _why_not() -> str:
    if not hasattr(os, "fork"):
        return "this platform has no fork"
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    return _out_of_range(found)


def _out_of_range(found: str) -> str:
    from packaging.requirements import Requirement

    try:
        wanted = importlib.metadata.requires("tpcompile") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return ""
    for requirement in map(Requirement, wanted):
        if requirement.name == "torch" and not requirement.specifier.contains(found, prereleases=True):
            return f"torch {found} is not in the range that tpcompile knows, {requirement.specifier}"
    return ""


def _start_server(name: str, *, preload: Sequence[str], plugins: Sequence[str]) -> None:
    """Start the server, unless a different process of the session has bound its address already."""
    try:
        listener = _bound(name, "server")
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.ENOENT):  # a server runs, or the session has ended
            return
        raise
    with listener:
        listener.listen(128)
        code = _CODE.format(path=sys.path, name=name, listener=listener.fileno(), preload=preload, plugins=plugins)
        # A session of its own: Ctrl-C is for pytest, which ends the ranks.
        subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=False,
        )


def connect(config: pytest.Config) -> Running:
    """A connection for one job, when ranks can be forked or it is known why they cannot."""
    return Running(*start_server(config))


class Running:
    """A job that is given to the server, from `start` to the end of its ranks; they are killed at the end of `with`."""

    def __init__(self, name: str, why_not: str) -> None:
        """Connect, and wait until the server can fork; `why_not` says why it cannot, if that is known."""
        self.why_not = why_not or HAS_ENDED
        self.pids: tuple[int, ...] = ()
        """Process ids of the ranks; empty when the server has ended."""
        self.codes: list[int | None] = []
        """Exit codes by rank as `is_served` last saw them: negative for a signal, None for a rank that runs."""
        self._connection: Connection | None = None
        if not why_not:
            with suppress(OSError, EOFError):
                self._connection = _connected(name, "server")
                self.why_not = self._connection.recv()

    def start(self, job: Job) -> None:
        """Fork the ranks."""
        self.codes = [None] * job.world_size
        self._send(job)
        with suppress(OSError, EOFError):
            if self._connection is not None:
                self.pids = self._connection.recv()

    def stop(self, ranks: Collection[int]) -> None:
        """Kill these ranks, after they have written their stacks."""
        if ranks:
            self._send(ranks)

    def exit_codes(self) -> list[int | None]:
        """Exit codes of now, by rank. Raises RuntimeError when the server has ended, and with it the ranks."""
        is_served = self.is_served()
        if None in self.codes and not is_served:
            raise RuntimeError(f"the ranks are lost: {HAS_ENDED}")
        return list(self.codes)

    def is_served(self, timeout_s: float = 0.0) -> bool:
        """False when all ranks have ended, or the server has; waits so long for that."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while self._connection is not None and self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                rank, code = self._connection.recv()
                self.codes[rank] = code
        except (OSError, EOFError):
            self._disconnect()
        return self._connection is not None

    def _send(self, message: object) -> None:
        with suppress(OSError):
            if self._connection is not None:
                self._connection.send(message)

    def close(self) -> None:
        """Kill the ranks that still run; none does when this returns."""
        self._send(None)
        self.is_served(_ENDING_S)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Sockets


@contextmanager
def _address(name: str, end: str) -> Iterator[str]:
    """The path of a socket. The kernel takes 107 bytes at most, which the temporary folder may exceed."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{end}" if sys.platform == "linux" else f"{name}/{end}"
    finally:
        os.close(folder)


def remove(name: str) -> None:
    """Remove the sockets of a session that has ended."""
    shutil.rmtree(name, ignore_errors=True)


def _bound(name: str, end: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    try:
        with _address(name, end) as address:
            found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def _connected(name: str, end: str) -> Connection:
    """Raises OSError when no process listens."""
    deadline_s = time.monotonic() + _LISTENING_S
    while True:
        found = socket.socket(socket.AF_UNIX)
        try:
            with _address(name, end) as address:
                found.connect(address)
            return Connection(found.detach())
        except OSError:
            found.close()
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_POLL_S)
