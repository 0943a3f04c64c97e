"""Jobs -> ranks, forked from this process, which has imported torch.

One supervisor per job is forked. It forks the ranks, sends their exit codes, and kills those that pytest wants stopped,
and all of them when the process that gave the job has ended.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from unittest import mock

from tpcompile.frames import with_room
from tpcompile.pytest_plugin.files import ENVIRON, SHOW_STACK, STREAMS, Job
from tpcompile.pytest_plugin.session import join, remove
from tpcompile.ranks.pool import ForkedRanks, become

_STACK_S = 0.3
"""Seconds that a rank has to write its stack before it is killed."""
_POLL_S = 0.1
"""Seconds between checks that the server still runs; the end of a rank and a message are seen at once."""
_ASK_S = 10.0
"""A process that has connected sends its job within this time, or has none."""


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
def _serve(listener: socket.socket, session: Connection, why_not: str) -> None:
    while session not in wait([listener, session]):
        connection = Connection(listener.accept()[0].detach())
        job = _receive_job(connection, why_not)
        if job is not None and os.fork() == 0:
            listener.close()
            try:
                _supervise(job, connection, session)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _receive_job(connection: Connection, why_not: str) -> Job | None:
    """Send the reason why no rank can run, and receive a job; None when there is none."""
    with suppress(OSError, EOFError):
        connection.send(why_not)
        if connection.poll(_ASK_S):
            job: Job | None = connection.recv()
            return job
    return None


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
    import tpcompile.pytest_plugin.function_on_ranks
    import tpcompile.pytest_plugin.rank  # noqa: F401
    from tpcompile.torch_api.forked import MODULES

    for name in MODULES:
        importlib.import_module(name)
    # Imports, tables and keys that torch leaves to the first compile.
    import torch

    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))  # no kernel of Inductor's own: no C++ compiler
    torch.compiler.reset()
    return ""


def _run_a_backward() -> None:
    """Run one before anything is traced, here or by a module of the user.

    A torch with CUDA and no GPU traces with a fake one, for which a first backward would start a thread, and none of
    autograd's threads survives a fork.
    """
    import torch

    torch.ones((), requires_grad=True).backward()


def _supervise(job: Job, connection: Connection, session: Connection) -> None:
    """Run the ranks of a job to their end. Called in a process of its own."""
    server = os.getppid()

    def run(rank: int, variables: dict[str, str]) -> int | None:
        connection.close()
        session.close()
        return _run_rank(job, rank, variables)

    ranks = ForkedRanks(job.world_size, run, is_swept=job.is_swept)
    _send(connection, tuple(ranks.running.values()))
    while ranks.running:
        for ended in ranks.ended():
            _send(connection, ended)
        stopped: Sequence[int] | None = ()
        if ranks.wait([connection], timeout_s=_POLL_S):
            try:
                stopped = connection.recv()  # ranks to be stopped; None when the job is to end
            except (OSError, EOFError):  # the process that gave it has ended
                stopped = None
        if stopped is None or os.getppid() != server:
            ranks.kill()  # without exit codes, which would say that they ended by themselves
        elif stopped:
            ranks.signal(SHOW_STACK, stopped)
            time.sleep(_STACK_S)
            ranks.signal(signal.SIGKILL, stopped)


def _send(connection: Connection, message: object) -> None:
    with suppress(OSError):  # the reader has ended, which is seen next
        connection.send(message)


def _run_rank(job: Job, rank: int, variables: Mapping[str, str]) -> int | None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    outputs = [
        os.open(job.files.output(rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for stream in STREAMS
    ]
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    become(job.environ, *outputs)
    stack = job.files.stack(rank).open("w")
    faulthandler.register(SHOW_STACK, file=stack, all_threads=False)
    module, _, name = job.target.partition(":")
    code: int | None = getattr(importlib.import_module(module), name)(job, rank, variables)
    return code
