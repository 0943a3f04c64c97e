"""Folders of jobs -> ranks, forked from this process, which has imported torch.

One supervisor per job is forked. It hosts the store as torchrun's agent does, forks the ranks, writes their exit codes,
and kills those that pytest wants stopped, and all of them when the process that gave the job has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn
from unittest import mock

from tpcompile.frames import with_room
from tpcompile.pytest_plugin.files import SHOW_STACK, STREAMS, Files, Job
from tpcompile.pytest_plugin.session import join, remove
from tpcompile.ranks import children

_STACK_S = 0.3
"""Seconds that a rank has to write its stack before it is killed."""
_POLL_S = 0.1
"""Between two looks for a rank to be stopped, and whether the server is there; the end of a rank is seen at once."""
_ASK_S = 10.0
"""A process that has connected names its job within this time, or has none."""
ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For ranks that share the cores, unless these variables are set."""
if Path("/sys/class/net/lo").exists():
    ENVIRON["GLOO_SOCKET_IFNAME"] = "lo"


def main(name: str, listener: int, preload: Sequence[str], plugins: Sequence[str]) -> None:
    """Import, then fork the ranks of every job until the session of that name has ended."""
    # Ranks are CPU processes, and CUDA does not survive a fork.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for variable, value in ENVIRON.items():
        os.environ.setdefault(variable, value)
    try:
        session = join(name)
    except OSError:  # it has ended
        return
    why_not = _prepare(preload, plugins)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _serve(socket.socket(fileno=listener), session, why_not)
    remove(name)  # the session may have been killed
    sys.stderr.flush()
    os._exit(0)  # without taking apart all that was imported


@with_room
def _serve(listener: socket.socket, session: socket.socket, why_not: str) -> None:
    while session not in wait([listener, session]):
        connection = listener.accept()[0]
        folder = _ask(connection, why_not)
        if folder and os.fork() == 0:
            listener.close()
            _supervise_and_exit(folder, connection, session)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _ask(connection: socket.socket, why_not: str) -> str:
    """Say why no rank can run, or read the folder of a job; empty when there is none."""
    connection.settimeout(_ASK_S)
    folder = ""
    with suppress(OSError), connection.makefile("r") as lines:
        connection.sendall(f"{json.dumps(why_not)}\n".encode())
        folder = lines.readline().rstrip("\n")
    connection.settimeout(None)
    return folder


def _prepare(preload: Sequence[str], plugins: Sequence[str]) -> str:
    """Import what every rank needs; why no rank can run, or an empty text."""
    gc.disable()  # importing torch makes objects that stay
    try:
        _run_a_backward()
        for name in preload:
            importlib.import_module(name)
        why_not = _warm_up()
        _load_plugins(plugins)
    except Exception as error:
        traceback.print_exc()
        why_not = f"{type(error).__name__}: {error}"
    gc.freeze()  # a collection in a rank would copy the pages that the forks share
    gc.enable()
    return why_not


def _load_plugins(names: Sequence[str]) -> None:
    """Import those of pytest's session as the session of a rank does, with their assertions rewritten.

    Conftest files and the ini file are left to the ranks: they may read variables that differ.
    """
    import pytest

    arguments = [word for name in names for word in ("-p", name)]
    config = pytest.Config.fromdictargs({}, ["--noconftest", "-c", os.devnull, *arguments])
    config._ensure_unconfigure()


def _warm_up() -> str:
    """Import torch and all that a first compile imports; why there can be no ranks, or an empty text."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch has no gloo"

    import tpcompile.checking
    import tpcompile.pytest_plugin.function
    import tpcompile.pytest_plugin.rank  # noqa: F401
    from tpcompile.torch_api.forked import MODULES

    for name in MODULES:
        importlib.import_module(name)
    _compile_once()
    return ""


def _run_a_backward() -> None:
    """Before anything is traced, here or by a module of the user: a torch with CUDA and no GPU traces with a fake one,
    for which a first backward would start a thread, and a process that has such threads cannot be forked.
    """
    import torch

    torch.ones((), requires_grad=True).backward()


def _compile_once() -> None:
    """Imports, tables and keys that torch leaves to the first compile."""
    import torch

    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))  # no kernel of Inductor's own: no C++ compiler
    torch.compiler.reset()


def _supervise_and_exit(folder: str, connection: socket.socket, session: socket.socket) -> NoReturn:
    try:
        _supervise(Job.read(folder), connection, session)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _supervise(job: Job, connection: socket.socket, session: socket.socket) -> None:
    """Run the ranks of a job to their end. Called in a process of its own."""
    from tpcompile.ranks.env import hosted_store

    server = os.getppid()
    # It listens from here on, so that no other process gets the port; the store has threads, and comes after the forks.
    listener = socket.create_server(("127.0.0.1", 0))
    left = {rank: _start(job, rank, listener, (connection, session)) for rank in range(job.world_size)}
    store = hosted_store(listener)
    ends = _ends_of_children()
    with suppress(BrokenPipeError):
        connection.sendall(f"{json.dumps(list(left.values()))}\n".encode())
    while left:
        for rank, code in children.ended(left):
            pid = left.pop(rank)
            if job.is_swept:
                children.sweep_group(pid)
            _write_code(job.files, rank, code)
        if os.getppid() != server or wait([connection], 0):
            _abandon(left.values())
            return
        stopped = [pid for rank, pid in left.items() if job.files.stop(rank).exists()]
        if stopped:
            _stop(stopped)
        if ends in wait([connection, ends], _POLL_S):
            os.read(ends, 1024)
    del store


def _ends_of_children() -> int:
    """A pipe that can be read when a child has ended."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler in Python nothing is written
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    return reads


def _abandon(pids: Iterable[int]) -> None:
    """End the ranks of a job whose server or reader has ended; no exit code says that they ended by themselves."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # it may not have its group yet
        children.sweep_group(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _write_code(files: Files, rank: int, code: int) -> None:
    """Under a temporary name first: the file must not be read half-written."""
    partial = files.folder / f"ending_{rank}"
    partial.write_text(str(code))
    partial.rename(files.exit(rank))


def _stop(pids: Iterable[int]) -> None:
    for number in (SHOW_STACK, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(_STACK_S if number == SHOW_STACK else 0)


def _start(job: Job, rank: int, listener: socket.socket, of_supervisor: Iterable[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        from tpcompile.ranks.env import local_variables

        port: int = listener.getsockname()[1]
        for inherited in (listener, *of_supervisor):
            inherited.close()
        _become(job, rank)
        module, _, name = job.target.partition(":")
        target = getattr(importlib.import_module(module), name)
        code = target(job, rank, local_variables(rank, job.world_size, port))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(job: Job, rank: int) -> None:
    """What a start of Python and the import of torch would have done for this rank."""
    from tpcompile.torch_api.forked import import_triton_as_asked, new_trace_handler

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in enumerate(STREAMS, start=1):
        os.dup2(os.open(job.files.output(rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(job.environ)
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    if "numpy" in sys.modules:  # Python's own generator is seeded again in every fork
        sys.modules["numpy"].random.seed()
    new_trace_handler()
    import_triton_as_asked()
