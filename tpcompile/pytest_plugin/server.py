"""Folders of jobs on stdin -> ranks, forked from this process, which has imported torch.

One supervisor per job is forked. It hosts the store as torchrun's agent does, forks the ranks, writes their exit codes,
and kills those that pytest wants stopped.
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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest import mock

from tpcompile.pytest_plugin.files import SHOW_STACK, STREAMS, Files, Job

_STACK_S = 0.3
"""Seconds that a rank has to write its stack before it is killed."""
_POLL_S = 0.02
_ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For ranks that share the cores, unless these variables are set."""
if Path("/sys/class/net/lo").exists():
    _ENVIRON["GLOO_SOCKET_IFNAME"] = "lo"


def main(preload: Sequence[str]) -> None:
    """Import, say on stdout what is missing, then read the folder of a job from each line of stdin."""
    # Ranks are CPU processes, and CUDA does not survive a fork.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in _ENVIRON.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    why_not = _prepare(preload)
    print(json.dumps(why_not), file=answers, flush=True)
    answers.close()
    if why_not:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for line in sys.stdin:
        if os.fork() == 0:
            _supervise_and_exit(json.loads(line))
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    gc.unfreeze()  # at its end a process drops what it has, and Triton's bindings complain where it is kept


def _prepare(preload: Sequence[str]) -> str:
    """Import what every rank needs; why no rank can run, or an empty text."""
    gc.disable()  # importing torch makes objects that stay
    try:
        for name in preload:
            importlib.import_module(name)
        why_not = _warm_up()
    except Exception as error:
        traceback.print_exc()
        why_not = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages that the forks share
    gc.enable()
    return why_not


def _warm_up() -> str:
    """Import torch and all that a first compile imports; why there can be no ranks, or an empty text."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch has no gloo"

    import tpcompile.checking
    import tpcompile.pytest_plugin.rank  # noqa: F401
    from tpcompile.torch_api.forked import MODULES

    for name in MODULES:
        importlib.import_module(name)
    _compile_once()
    return ""


def _compile_once() -> None:
    """Imports, tables and keys that torch leaves to the first compile."""
    import torch

    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))  # no kernel of Inductor's own: no C++ compiler
    torch.compiler.reset()


def _supervise_and_exit(folder: str) -> NoReturn:
    try:
        _supervise(Job.read(folder), server=os.getppid())
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _supervise(job: Job, *, server: int) -> None:
    """Run the ranks of a job to their end. Called in a process of its own."""
    # It listens from here on, so that no other process gets the port; the store has threads, and comes after the forks.
    listener = socket.create_server(("127.0.0.1", 0))
    left = {rank: _start(job, rank, listener) for rank in range(job.world_size)}
    store = _host_store(listener)
    while left:
        for rank, code in _ended(left):
            _sweep_group(left.pop(rank))
            _write_code(job.files, rank, code)
        is_orphaned = os.getppid() != server
        stopped = [pid for rank, pid in left.items() if is_orphaned or job.files.stop(rank).exists()]
        if stopped:
            _stop(stopped)
        time.sleep(_POLL_S)
    del store


def _ended(left: dict[int, int]) -> list[tuple[int, int]]:
    """The ranks that have ended, with their exit codes."""
    found = []
    for rank, pid in left.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((rank, os.waitstatus_to_exitcode(status)))
    return found


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


def _sweep_group(pid: int) -> None:
    """End what a rank has left behind, a compiler for example."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _host_store(listener: socket.socket) -> Any:
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _start(job: Job, rank: int, listener: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        port: int = listener.getsockname()[1]
        listener.close()
        _become(job, rank, port)
        from tpcompile.pytest_plugin.rank import run

        code = run(job, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(job: Job, rank: int, port: int) -> None:
    """What a start of Python and the import of torch would have done for this rank."""
    from tpcompile.torch_api.forked import new_trace_handler

    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in enumerate(STREAMS, start=1):
        os.dup2(os.open(job.files.output(rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(_ENVIRON | job.environ | _variables(job, rank, port))
    os.environ.pop("GITHUB_STEP_SUMMARY", None)  # pytest writes it, when it knows which tests failed
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    sys.argv = ["pytest", *job.args]
    if "numpy" in sys.modules:  # Python's own generator is seeded again in every fork
        sys.modules["numpy"].random.seed()
    new_trace_handler()


def _variables(job: Job, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"pytest-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
