"""Top-level function -> its result on each of N ranks of this machine; how ranks are started, followed and ended.

What every start guarantees, whether ranks are forked from this process, forked from the server of a pytest session, or
spawned by multiprocessing:

- A rank has torchrun's variables, and a store at MASTER_ADDR and MASTER_PORT that outlives it, as that of torchrun's
  agent does. The port is taken before the ranks start, so that no other process gets it.
- Exit codes are known by rank as the ranks end, negative for a signal.
- When a call is over, because all ranks ended, one failed, or time was up, none of them runs. On Linux no rank outlives
  the process that started it, which may have been killed.
- A rank leads a session: what it leaves in its process group, a compiler for example, is killed with it.

torchrun starts ranks by itself: that is one command with all its processes, `tpcompile.process_tree`. It is not here,
as the launcher has to start without torch. This module imports torch when ranks are started.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil

T = TypeVar("T")
Main: TypeAlias = Callable[[int, dict[str, str]], int | None]
"""What a forked rank runs, given its number and torchrun's variables; returns its exit code."""
_POLL_S = 0.02
"""Pause between looks at exit codes."""
_SETTLED_S = 0.1
"""A rank that fails because a different rank died has ended so long after it: both are reported."""
_PR_SET_PDEATHSIG = 1
_EX_SOFTWARE = 70
"""Exit code of a forked rank that raised."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What every rank of a `run_on_ranks` runs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    collective_timeout_s: float
    folder: Path
    """Folder in which each rank writes its result or its traceback."""


ExitCodes: TypeAlias = Callable[[], list[int | None]]
"""Exit codes by rank, negative for a signal, None for a rank that runs; RuntimeError when they are lost."""
Start: TypeAlias = Callable[[Call], AbstractContextManager[ExitCodes]]
"""Starts the ranks of a call; the end of `with` kills those that still run and returns when none does."""

_REGISTERED: list[Start] = []


def register(start: Start) -> Callable[[], None]:
    """Start ranks so from now on, unless a call names a start method; returns what undoes it."""
    _REGISTERED.append(start)
    return functools.partial(_REGISTERED.remove, start)


def run_on_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    start_method: str | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks on this machine and return the results in rank order.

    The default group exists while it runs. Each rank has one CPU thread, torchrun's variables, and a store at
    MASTER_ADDR and MASTER_PORT that outlives it.

    fn: importable from a different process (top level of a module); its results must pickle.
    args: its positional arguments, equal on all ranks.
    world_size: number of ranks.
    timeout_s: seconds after which ranks that still run are killed and named.
    collective_timeout_s: seconds after which a collective gives up; None waits as long as the job.
    start_method: "spawn", "forkserver", or None for the best that works here.

    In a pytest session with the plugin of this package, ranks are forked from the session's server, which has imported
    torch. Elsewhere, or with `start_method="spawn"`, each rank imports torch itself, which takes about ten seconds: do
    many checks in one call, or import torch once for all calls, with
    `multiprocessing.set_forkserver_preload(["torch", ...])` and `start_method="forkserver"`.

    Raises RuntimeError with the rank and the traceback of the first that failed, TimeoutError with the ranks still
    running when time is up; both after killing every rank.
    """
    import torch

    limit_s = timeout_s if collective_timeout_s is None else collective_timeout_s
    with tempfile.TemporaryDirectory(prefix="tpcompile-ranks-") as name:
        folder = Path(name)
        call = Call(fn=fn, args=args, world_size=world_size, collective_timeout_s=limit_s, folder=folder)
        is_registered = start_method is None and _REGISTERED
        started = _REGISTERED[-1](call) if is_registered else spawned(call, start_method=start_method or "spawn")
        with started as exit_codes:
            _wait(exit_codes, time.monotonic() + timeout_s)
            _raise_first_failure(exit_codes(), folder)
        return [torch.load(folder / f"result_{rank}", weights_only=False) for rank in range(world_size)]


def _wait(exit_codes: ExitCodes, deadline_s: float) -> None:
    """Return when all ranks have ended or one has failed."""
    codes = exit_codes()
    while None in codes and not any(codes):
        if time.monotonic() > deadline_s:
            alive = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {alive} did not finish in time")
        time.sleep(_POLL_S)
        codes = exit_codes()
    if any(codes):
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


# Started by multiprocessing


@contextmanager
def spawned(call: Call, *, start_method: str = "spawn") -> Iterator[ExitCodes]:
    """Start the ranks of a call by multiprocessing."""
    context: Any = multiprocessing.get_context(start_method)
    processes: list[BaseProcess] = []

    def start(rank: int, variables: Mapping[str, str], _: socket.socket) -> None:
        process = context.Process(target=_run_spawned, args=(call, rank, variables), daemon=True)
        processes.append(process)
        process.start()

    store = None
    try:
        store = with_store(call.world_size, start)[1]
        yield lambda: [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
                _kill_group(process.pid)
        del store


def _run_spawned(call: Call, rank: int, variables: Mapping[str, str]) -> None:
    os.setsid()
    end_with_parent()
    os.environ.update(variables)
    code = run_rank(call, rank)
    if code:
        os._exit(code)


def with_store(world_size: int, start: Callable[[int, dict[str, str], socket.socket], T]) -> tuple[list[T], object]:
    """What `start` returns for each rank and its variables; and their store, served as long as that is referenced.

    `start` is also given the socket of the store, for a forked rank to close: its peers would not see the store end.
    """
    from tpcompile.ranks.env import hosted_store, local_variables

    # It listens from here on, so that no other process gets the port. The store comes after the ranks, which may be
    # forked: its thread takes the lock of the C library's resolver, which a fork at that moment would keep for ever.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        started = [start(rank, local_variables(rank, world_size, port), listener) for rank in range(world_size)]
        return started, hosted_store(listener)


# Forked from this process


class ForkedRanks:
    """Ranks that are forked from this process, a supervisor of their own with torch imported and without threads.

    With `is_swept`, what a rank leaves in its process group is killed.
    """

    def __init__(self, world_size: int, main: Main, *, is_swept: bool = True) -> None:
        self._is_swept = is_swept
        pids, self._store = with_store(world_size, functools.partial(_fork, main))
        self.running = dict(enumerate(pids))
        """Rank -> process, of those that `ended` has not returned."""
        self._ends, writes = os.pipe()
        """A pipe that can be read when a child has ended."""
        os.set_blocking(writes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler in Python nothing is written
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def ended(self) -> list[tuple[int, int]]:
        """Ranks that have ended since the last call, with their exit codes. Does not wait."""
        found = []
        for rank, pid in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.running[rank]
                if self._is_swept:
                    _kill_group(pid)
                found.append((rank, os.waitstatus_to_exitcode(status)))
        return found

    def wait(self, connections: Sequence[Connection] = (), *, timeout_s: float) -> bool:
        """Wait for the end of a rank, or a message of one of `connections`; True when there is a message."""
        ready = wait([*connections, self._ends], timeout_s)
        if self._ends in ready:
            os.read(self._ends, 1024)
        return any(connection in ready for connection in connections)

    def signal(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to these ranks, by default to all, as far as they still run."""
        for rank in self.running if ranks is None else ranks:
            if rank in self.running:
                os.kill(self.running[rank], number)

    def kill(self) -> None:
        """End all ranks and what they started; returns when none runs."""
        self.signal(signal.SIGKILL)
        for pid in self.running.values():
            os.waitpid(pid, 0)
            _kill_group(pid)
        self.running.clear()


def _fork(main: Main, rank: int, variables: dict[str, str], listener: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code: int | None = _EX_SOFTWARE
    try:
        listener.close()
        os.setsid()
        end_with_parent()
        if os.getppid() == parent:
            code = main(rank, variables)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, even by SIGKILL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def _kill_group(pid: int) -> None:
    """Kill what a rank, which was waited for, has left in its process group."""
    if psutil.pid_exists(pid):  # a new process: the kernel gives a number away only when no group has it any more
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def become(environ: Mapping[str, str], stdout: int, stderr: int) -> None:
    """Set up a forked process as a new Python with torch would be, with these variables and output files."""
    from tpcompile.torch_api.forked import import_triton_as_asked, new_trace_handler

    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:  # Python's own generator is seeded again in every fork
        sys.modules["numpy"].random.seed()
    new_trace_handler()
    import_triton_as_asked()


# In the process of a rank


def run_rank(call: Call, rank: int) -> int:
    """Run a call on this rank, which has torchrun's variables, and write the result or the traceback.

    Returns the exit code of the process.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        connect(timeout_s=call.collective_timeout_s)
        result = call.fn(*call.args)
        _write(call.folder / f"result_{rank}", lambda path: torch.save(result, path))
        dist.destroy_process_group()
    except BaseException:
        text = traceback.format_exc()
        _write(_error(call.folder, rank), lambda path: path.write_text(text))
        return 1
    return 0


def connect(*, timeout_s: float) -> None:
    """Make the default group of gloo ranks with torchrun's variables; collectives give up after `timeout_s`."""
    import torch.distributed as dist

    from tpcompile.ranks.store import RankStore

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    # gloo returns when this rank's own connections stand: a rank that ends at once would cut those that others still
    # make ("Connection closed by peer" in their init_process_group).
    RankStore.of_job("tpcompile/ranks").wait_for_ranks("connected", timeout_s=timeout_s)


def _error(folder: Path, rank: int) -> Path:
    return folder / f"error_{rank}"


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name first: the file must not be read half-written."""
    partial = path.with_name(f"partial_{path.name}")
    write(partial)
    partial.rename(path)
