"""Python command -> how it ended, in a process forked from one that has imported torch; ranks of torchrun as well.

The imports cost a process some 8 s of CPU time, a fork none. What a fork cannot show starts a fresh interpreter: a hash
seed, what torch reads when it is imported, what a program itself imports; and a command that sees GPUs, since the
server of the forks has looked for them and found none. The launcher is torch's own either way: the agent, its store,
error files, restarts and root cause are those of a real torchrun.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil
import pytest

from tpcompile.process_tree import sweep
from tpcompile.pytest_plugin.files import STREAMS, Files, Job, read_text
from tpcompile.pytest_plugin.session import Running, connect
from tpcompile.ranks.pool import become

TORCHRUN = ("-m", "torch.distributed.run")
FORKED = (
    TORCHRUN[1], "tpcompile.bench", "tpcompile.dryrun", "tpcompile.fastpath.certify", "tpcompile.gate.faults",
    "tpcompile.gate.in_rank",
    "tpcompile.fusion", "tpcompile.fusion.win", "tpcompile.fusion.win.measure_mode",
)  # fmt: skip
"""Modules that a command starts with `python -m`, or becomes, since they use torch; a forked one has it already."""
ROOT = Path(__file__).resolve().parents[1]
STARTUP = str(ROOT / "tests" / "startup")
"""In PYTHONPATH: `sitecustomize` of every process that a test starts."""
CALLERS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", STARTUP)]
PYTHONPATH = os.pathsep.join([str(ROOT), STARTUP, *CALLERS])
"""For a process that a test starts: this tree, and what the caller has there, a torch for example."""
_JOB = "TPCOMPILE_TESTS_JOB"
_SERVER = "from tpcompile.pytest_plugin.server import main"
"""In the code of the process that the ranks of a pytest session are forked from."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""The code of a worker of pytest-xdist, until it is sent its own."""
_SHOW_STACKS = signal.SIGUSR1
_STACKS_S = 1.0
_POLL_S = 0.02
_CONFIG: list[pytest.Config] = []


def use(config: pytest.Config) -> None:
    """Fork from the server of this session."""
    _CONFIG[:] = [config]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    returncode: int
    """124 when it was killed at its limit."""
    stdout: str
    stderr: str
    left_running: tuple[str, ...]
    """Processes of the job that outlived the command; they were killed."""


def run_python(
    arguments: Sequence[str | Path],
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    timeout_s: float = 200.0,
) -> Ended:
    """Run `python ARGUMENTS` (`-m MODULE` or a script, and theirs) to its end; nothing is left running."""
    command = [str(argument) for argument in arguments]
    with TemporaryDirectory() as name:
        folder = Path(name)
        running = start("tests.forked:play_job", folder, {"command": command}, environ={**environ, _JOB: name}, cwd=cwd)
        try:
            running.is_served(timeout_s)
            (code,) = running.exit_codes()
            if code is None:
                _ask_for_stacks(folder)
        finally:
            running.close()
            left = _sweep(folder, running.pids)
        out, err = (read_text(Files(folder).output(0, stream)) for stream in STREAMS)
        return Ended(returncode=124 if code is None else code, stdout=out, stderr=err, left_running=left)


def torchrun(
    arguments: Sequence[str | Path],
    *,
    nproc: int = 2,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    timeout_s: float = 200.0,
) -> Ended:
    """`torchrun --standalone --nproc-per-node NPROC ARGUMENTS`; an option of torchrun may come first."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(nproc), *arguments]
    variables = {**environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return run_python(command, environ=variables, cwd=cwd, timeout_s=timeout_s)


def start(
    target: str,
    folder: Path,
    arguments: dict[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Running:
    """A process that calls `target`; what it leaves running is for the test to find."""
    running = connect(_CONFIG[0])
    if running.why_not:
        raise RuntimeError(f"no process can be forked: {running.why_not}")
    job = Job(
        folder=str(folder),
        world_size=1,
        target=target,
        arguments=arguments,
        environ=dict(environ),
        cwd=str(cwd or Path.cwd()),
        timeout_s=0.0,
        is_swept=False,
    )
    running.start(job)
    return running


def free_port() -> int:
    """A TCP port of this machine that nothing listens at."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def became(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Wait until something is so; False when it is not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def runs(pid: int | str) -> bool:
    """True for a process that has not ended; a zombie, whose parent has not asked for it, has."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    return False


# In the forked processes


def play_job(job: Job, rank: int, variables: Mapping[str, str]) -> NoReturn:
    """The command itself."""
    _show_stacks_if_asked()
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.execv(sys.executable, [sys.executable, *job.arguments["command"]])
    subprocess.Popen = _Popen  # type: ignore[misc]
    os.execv = _become_or_exec
    _play_command(job.arguments["command"])


def _play_command(command: Sequence[str]) -> NoReturn:
    """Run `python COMMAND`; torchrun forks its ranks."""
    if tuple(command[:2]) == TORCHRUN:
        from torch.distributed.elastic.multiprocessing.api import SubprocessContext
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        SubprocessHandler._popen = _start_rank
        SubprocessContext._start = functools.partialmethod(_start_ranks, SubprocessContext._start)
        dynamic_rendezvous.get_method_name = _method_name
    _play(command)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """What the command starts; a torchrun, as of `tpcompile gate`, and workers and server of a session are forked."""

    def __init__(self, command: Any, **options: Any) -> None:
        words = [str(word) for word in command] if isinstance(command, Sequence) else []
        if _is_forked(words):
            variables = {**os.environ} if options.get("env") is None else dict(options["env"])
            options["preexec_fn"] = functools.partial(_become_python, words[1:], variables)
        elif words[:2] == [sys.executable, "-c"] and _SERVER in words[2]:
            options["preexec_fn"] = functools.partial(_become_server, words[2])
        elif words[:1] == [sys.executable] and words[-1] == WORKER:
            options["preexec_fn"] = functools.partial(_become_worker, dict(options.get("env") or os.environ))
        super().__init__(command, **options)


def _is_forked(words: Sequence[str]) -> bool:
    return list(words[:2]) == [sys.executable, "-m"] and words[2] in FORKED


_EXECV = os.execv
BOOTSTRAP = "tpcompile.cli.becoming"


def _become_or_exec(path: str, command: Sequence[str]) -> NoReturn:
    """Stands for `os.execv`, by which a command without torch becomes one with it."""
    played = [word for word in command if word != BOOTSTRAP]
    if _is_forked(played):
        _play_command(played[1:])
    _EXECV(path, command)


def _become_server(code: str) -> NoReturn:
    """As `_become_python`."""
    _begin_session()
    exec(code, {})
    os._exit(0)


def _become_worker(environ: Mapping[str, str]) -> NoReturn:
    """As `_become_python`."""
    _begin_session()
    _become(environ, 1, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    exec(WORKER, {"__name__": "__main__"})
    os._exit(0)


def _begin_session() -> None:
    """As a new process, which has imported no file of the session's folder."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{os.getcwd()}/"):
            del sys.modules[name]
    close_on_exec()


def _become_python(command: list[str], environ: dict[str, str]) -> NoReturn:
    """In the child, where `exec` would follow: it does not return."""
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # the parent's: a temporary folder, for example
    close_on_exec()
    _become(environ, 1, 2)
    _play_command(command)


def close_on_exec() -> None:
    """What `exec` closes; one of them is the pipe in which the parent waits for it."""
    gc.enable()
    _close(lambda number: not os.get_inheritable(number))


def _method_name(depth: int = 2) -> str:
    """Stands for torch's, which reads the source of every caller: half a second a job, with all modules imported."""
    return sys._getframe(depth).f_code.co_name


class _Starting:
    """The ranks that are being started go on when all are forked: both ends of a pipe that nothing is written to.

    A rank that connects to the agent's store makes a thread of the agent take the lock of the C library's resolver. The
    next rank, forked at that moment, would find it locked for ever.
    """

    ends: tuple[int, int]


def _start_ranks(context: Any, start: Callable[[Any], None]) -> None:
    """Stands for `SubprocessContext._start`."""
    _Starting.ends = os.pipe()
    try:
        start(context)
    finally:
        for end in _Starting.ends:
            os.close(end)


def _wait_for_all_ranks() -> None:
    reads, writes = _Starting.ends
    os.close(writes)
    os.read(reads, 1)  # returns when the agent and all ranks have closed the other end
    os.close(reads)


def _start_rank(handler: Any, command: Sequence[str], environ: dict[str, str]) -> Any:
    """Stands for `SubprocessHandler._popen` of torch 2.11 and 2.13: a rank is forked, if it runs Python."""
    output, errors = handler._stdout, handler._stderr
    if command[0] != sys.executable:
        return subprocess.Popen(command, env=environ, stdout=output, stderr=errors, start_new_session=True)
    pid = os.fork()
    if pid:
        return _Rank(pid)
    os.setsid()
    _wait_for_all_ranks()
    # A rank that kept the sockets of the agent's store open would hide the agent's end from its peers.
    _close(lambda number: stat.S_ISSOCK(os.fstat(number).st_mode))
    _become(environ, output.fileno() if output else 1, errors.fileno() if errors else 2)
    _play(command[1:])


class _Rank:
    """What the agent of torchrun uses of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        Path(os.environ[_JOB], f"pid_{pid}").touch()

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank of process {self.pid}", timeout)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode


def _become(environ: Mapping[str, str], stdout: int, stderr: int) -> None:
    become(environ, stdout, stderr)
    _show_stacks_if_asked()


def _show_stacks_if_asked() -> None:
    faulthandler.register(_SHOW_STACKS, file=2, all_threads=True)


def _play(command: Sequence[str]) -> NoReturn:
    """Run `python COMMAND` and end this process as it would end."""
    from tests.faults.run import play  # torch: only those that are forked have it already

    arguments = [argument for argument in command if argument != "-u"]
    first = os.getcwd() if arguments[0] == "-m" else str(Path(arguments[0]).resolve().parent)
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    play(arguments)


def _close(is_meant: Callable[[int], bool]) -> None:
    """Replace, not close, the files: an object of the parent that dies here would close a new one."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and is_meant(int(name)):
                os.dup2(nothing, int(name))


# What is left


def _ask_for_stacks(folder: Path) -> None:
    """Where every rank of a job that hangs stands, into its stderr; one by one, since each writes piece by piece."""
    for rank in folder.glob("pid_*"):
        with suppress(OSError):
            os.kill(int(rank.name.removeprefix("pid_")), _SHOW_STACKS)
            time.sleep(_STACKS_S)


def _sweep(folder: Path, sessions: Iterable[int]) -> tuple[str, ...]:
    """Kill what still runs of a job: its sessions, and what has its environment, which a fork has not."""
    sessions = {int(path.name.removeprefix("pid_")) for path in folder.glob("pid_*")} | set(sessions)
    return sweep(lambda process: os.getsid(process.pid) in sessions or process.environ().get(_JOB) == str(folder))
