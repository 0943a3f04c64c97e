"""Program file, number of ranks -> how it ended: ranks forked from this process, which has imported torch.

A case costs a second instead of ten. `preload` imports what programs need; then `Runs` forks one supervisor per run,
which hosts the store as torchrun's agent does, forks the ranks, and ends the others when one fails.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from tests.faults.drawn.names import AFTER, ENDED, TRACE
from tpcompile.ranks import children
from tpcompile.ranks.env import hosted_store, local_variables
from tpcompile.torch_api.forked import new_trace_handler

_GRACE_S = 20.0
"""Seconds from SIGTERM to SIGKILL; torchrun leaves 30."""
_POLL_S = 0.05
_LOOK_S = 1.0
"""Seconds between two samples of the CPU time of the ranks; each reads all of /proc."""
_BUSY_TICKS = 5
"""CPU time, in ticks of 10 ms, of all ranks between two samples, above which they do more than idle threads."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run."""

    program: Path
    out: Path
    world_size: int
    settings: dict[str, object]
    """What `frame.start` reads."""
    limit_s: float
    stuck_s: float | None = None
    """With the fault acting and no CPU time used for so long, the job hangs; None to wait for `limit_s`."""
    reached: str = ""
    """Pattern of files that say that the fault acts."""
    is_traced: bool = False
    cache: Path | None = None
    """Folder of Inductor's cache; None for one of its own."""
    after: tuple[str, ...] = ()
    """Command to run when the ranks have ended; its output goes to after.txt."""
    if_ended_badly: tuple[str, ...] = ()
    """Further arguments of that command when a rank crashed or the job hung, which a person would give."""
    fresh_interpreters: bool = False
    """Start Python anew for every rank: CUDA does not survive a fork."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    codes: dict[int, int]
    """Rank -> exit code, negative for a signal, also of the ranks that the supervisor ended."""
    is_hang: bool
    wall_s: float


def supervise(launch: Launch) -> Ended:
    """Run the ranks of a launch to their end. Called in a process of its own."""
    # It listens from here on, so that no other process gets the port; the store has threads, and comes after the forks.
    listener = socket.create_server(("127.0.0.1", 0))
    pids = {rank: _start(launch, rank, listener) for rank in range(launch.world_size)}
    store = hosted_store(listener)
    watch = _Watch(launch)
    codes: dict[int, int] = {}
    left = dict(pids)
    failed_at: float | None = None
    is_hang = False
    while left:
        for rank, code in children.ended(left):
            codes[rank] = code
            del left[rank]
        if failed_at is None and any(codes.values()):
            failed_at = time.monotonic()
            _signal(left.values(), signal.SIGTERM)
        if left and failed_at is None and not is_hang and watch.is_hang(left.values()):
            is_hang = True
            _signal(left.values(), signal.SIGTERM, signal.SIGKILL)
        if left and failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            _signal(left.values(), signal.SIGKILL)
        time.sleep(_POLL_S)
    for pid in pids.values():
        children.sweep_group(pid)
    del store
    return Ended(codes=codes, is_hang=is_hang, wall_s=time.time() - watch.began_at)


class _Watch:
    """Whether a run still makes progress."""

    def __init__(self, launch: Launch) -> None:
        self.began_at = time.time()
        self._launch = launch
        self._cpu_ticks = 0
        self._busy_at = time.time()
        self._looked_at = 0.0

    def is_hang(self, pids: Iterable[int]) -> bool:
        """True when the limit is over, or when the fault acts and no process uses the CPU."""
        now = time.time()
        if now - self.began_at > self._launch.limit_s:
            return True
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        if self._launch.stuck_s is None or not self._acts():
            self._busy_at = now
            return False
        ticks = _cpu_ticks(set(pids))
        if ticks - self._cpu_ticks >= _BUSY_TICKS:
            self._busy_at = now
        self._cpu_ticks = ticks
        return now - self._busy_at > self._launch.stuck_s

    def _acts(self) -> bool:
        return any(self._launch.out.glob(self._launch.reached))


def _cpu_ticks(groups: set[int]) -> int:
    """CPU time of all processes in these process groups."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) in groups:
            total += int(fields[11]) + int(fields[12])
    return total


def _signal(pids: Iterable[int], *signals: int) -> None:
    for pid in pids:
        for number in signals:
            os.kill(pid, number)


def _start(launch: Launch, rank: int, listener: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    port: int = listener.getsockname()[1]
    listener.close()
    output = os.open(launch.out / f"out_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(_environment(launch, rank, port))
    if launch.fresh_interpreters:
        os.execv(sys.executable, [sys.executable, str(launch.program)])
    _become(launch)
    _play(launch.program)


def _environment(launch: Launch, rank: int, port: int) -> dict[str, str]:
    settings = {**launch.settings, "out": str(launch.out)}
    trace = {"TORCH_TRACE": str(launch.out / TRACE)} if launch.is_traced else {}
    return {
        **trace,
        **local_variables(rank, launch.world_size, port),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(launch.cache or launch.out / "cache"),
        "GENERATED_SETTINGS": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _become(launch: Launch) -> None:
    """What the import of torch and Python's start would have done with this environment."""
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    new_trace_handler()
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    # In a shared cache folder only C++ is reused: each run compiles its own graphs.
    inductor_config.fx_graph_cache = launch.cache is None
    functorch_config.enable_autograd_cache = launch.cache is None


def _play(program: Path) -> NoReturn:
    """Run the program as `python PROGRAM` would, and end this process."""
    sys.argv = [str(program)]
    end_as_python(lambda: runpy.run_path(str(program), run_name="__main__"))


def end_as_python(run: Callable[[], object]) -> NoReturn:
    """Run a program, and end this process with its exit code, as the interpreter does at its end."""
    code = 0
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What `Py_FinalizeEx` does first; typeshed leaves the private function out.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def preload(modules: Sequence[str]) -> list[str]:
    """Import modules before the first fork; those that are missing are returned."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


class Runs:
    """Parallel runs, each under a forked supervisor."""

    def __init__(self, jobs: int, done: Callable[[Launch, Ended], None]) -> None:
        self._jobs = jobs
        self._done = done
        self._active: dict[int, Launch] = {}

    def add(self, launch: Launch, caches: Path) -> None:
        """Start a run as soon as there is room. Parallel runs have caches of their own: a lock is idle time."""
        while len(self._active) >= self._jobs:
            self._wait_for_one()
        launch.out.mkdir(parents=True, exist_ok=True)
        used = {running.cache for running in self._active.values()}
        free = [caches / str(slot) for slot in range(self._jobs) if caches / str(slot) not in used]
        launch = replace(launch, cache=free[0])
        pid = os.fork()
        if pid == 0:
            _supervise_and_exit(launch)
        self._active[pid] = launch

    def finish(self) -> None:
        """Wait for what still runs."""
        while self._active:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        pid, _ = os.wait()
        launch = self._active.pop(pid, None)
        if launch is not None:
            self._done(launch, read_ended(launch.out))


def _supervise_and_exit(launch: Launch) -> None:
    try:
        ended = supervise(launch)
        _run_after(launch, ended)
        (launch.out / ENDED).write_text(json.dumps(asdict(ended)))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _run_after(launch: Launch, ended: Ended) -> None:
    if not launch.after:
        return
    ended_badly = ended.is_hang or any(ended.codes.values())
    command = [*launch.after, *(launch.if_ended_badly if ended_badly else ())]
    with (launch.out / "after.txt").open("wb") as output:
        process = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=120.0)
    (launch.out / AFTER).write_text(json.dumps(process.returncode))


def read_ended(out: Path) -> Ended:
    """What a supervisor wrote."""
    fields = json.loads((out / ENDED).read_text())
    codes = {int(rank): code for rank, code in fields["codes"].items()}
    return Ended(codes=codes, is_hang=fields["is_hang"], wall_s=fields["wall_s"])
