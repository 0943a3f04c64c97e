"""Launches -> how each ended: ranks that torchrun starts, or forks of this process, which has imported torch.

A case costs a second instead of ten where its ranks are forked. `finished` forks one supervisor per launch. It
ends forked ranks when one of them fails, or when no CPU time is used any more.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

import torch._functorch.config
import torch._inductor.config

from tests.faults.names import AFTER, ENDED
from tpcompile.launch import torchrun
from tpcompile.process_tree import run_tree
from tpcompile.ranks.pool import ForkedRanks, become, end_with_parent

ROOT = Path(__file__).resolve().parents[2]
FEW_THREADS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_TREE_GRACE_S = 3.0
_GRACE_S = 20.0
"""Seconds from SIGTERM to SIGKILL; torchrun leaves 30."""
_POLL_S = 0.05
_LOOK_S = 1.0
"""Seconds between two samples of the CPU time of the ranks; each reads all of /proc."""
_BUSY_TICKS = 5
"""CPU time, in ticks of 10 ms, of all ranks between two samples, above which they do more than idle threads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """One run; a key of what is known of it."""

    out: Path
    command: tuple[str, ...]
    """Arguments of Python for a rank: a file or `-m` and a module, and theirs."""
    world_size: int
    limit_s: float
    by: Literal["torchrun", "fork", "exec"] = "torchrun"
    """Forks share what this process has imported; `exec` starts Python anew in them: CUDA does not survive a fork."""
    environ: Mapping[str, str] = field(default_factory=lambda: FEW_THREADS)
    """Variables of all ranks, beside those of this process."""
    own: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Rank -> variables of its own, under torchrun."""
    stuck_s: float | None = None
    """With the fault acting and no CPU time used for so long, forked ranks hang; None to wait for `limit_s`."""
    reached: str = ""
    """Pattern of files that say that the fault acts."""
    after: tuple[str, ...] = ()
    """Command to run when the ranks have ended; its output goes to after.txt."""
    if_ended_badly: tuple[str, ...] = ()
    """Further arguments of that command when a rank crashed or the job hung, which a person would give."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    codes: dict[int, int]
    """Rank -> exit code, negative for a signal, also of the ranks that were ended; only torchrun's own, as rank 0's."""
    is_hang: bool
    wall_s: float


def finished(launches: Iterable[Launch], slots: Sequence[Mapping[str, str]]) -> Iterator[tuple[Launch, Ended]]:
    """Run the launches beside each other, and yield each when it has ended.

    As many run at a time as there are slots; each has the variables of its slot, those of the launch come first. Two
    that run at the same time have caches or GPUs of their own in this way.
    """
    free = list(range(len(slots)))
    active: dict[int, tuple[int, Launch]] = {}
    for launch in launches:
        while not free:
            yield from _ended_ones(active, free)
        slot = free.pop(0)
        launch.out.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            _supervise_and_exit(replace(launch, environ={**slots[slot], **launch.environ}))
        active[pid] = slot, launch
    while active:
        yield from _ended_ones(active, free)


def _ended_ones(active: dict[int, tuple[int, Launch]], free: list[int]) -> Iterator[tuple[Launch, Ended]]:
    time.sleep(_POLL_S)
    for pid in list(active):
        has_ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        if has_ended:
            slot, launch = active.pop(pid)
            free.append(slot)
            yield launch, read_ended(launch.out)


def read_ended(out: Path) -> Ended:
    """What a supervisor wrote."""
    fields = json.loads((out / ENDED).read_text())
    codes = {int(rank): code for rank, code in fields["codes"].items()}
    return Ended(codes=codes, is_hang=fields["is_hang"], wall_s=fields["wall_s"])


def _supervise_and_exit(launch: Launch) -> NoReturn:
    try:
        end_with_parent(signal.SIGTERM)
        ended = _under_torchrun(launch) if launch.by == "torchrun" else supervise(launch)
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


def environment(launch: Launch) -> dict[str, str]:
    """Variables of all ranks of a launch; it has a cache of its own, if its slot has none."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(launch.out / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **launch.environ,
    }


# Ranks under torchrun


def _under_torchrun(launch: Launch) -> Ended:
    """Run a launch to its end, its output in log.txt; nothing is left running."""
    log = os.open(launch.out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    command = torchrun_with(launch.command, nproc=launch.world_size, own=launch.own)
    began_at = time.time()
    ended = run_tree(command, environ=environment(launch), timeout_s=launch.limit_s, grace_s=_TREE_GRACE_S)
    return Ended(codes={0: ended.exit_code}, is_hang=ended.timed_out, wall_s=time.time() - began_at)


def torchrun_with(rank: Sequence[str], *, nproc: int, own: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Command that starts Python with the arguments `rank` on `nproc` ranks, each with variables of its own.

    A shell sets them: Python reads its hash seed when it starts, and torch reads variables when it is imported.
    """
    exports = [f"{rank}) export {_assignments(variables)} ;;" for rank, variables in own.items() if variables]
    shell = f'case $RANK in {" ".join(exports)} esac; exec "$0" "$@"'
    return torchrun(nproc, ["--no-python", "sh", "-c", shell, sys.executable, *rank])


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


# Forked ranks


def supervise(launch: Launch) -> Ended:
    """Run the forked ranks of a launch to their end. Called in a process of its own."""
    ranks = ForkedRanks(launch.world_size, functools.partial(_play_rank, launch))
    watch = _Watch(launch)
    codes: dict[int, int] = {}
    failed_at: float | None = None
    is_hang = False
    while ranks.running:
        ranks.wait(timeout_s=_POLL_S)
        codes |= dict(ranks.ended())
        if failed_at is None and any(codes.values()):
            failed_at = time.monotonic()
            ranks.signal(signal.SIGTERM)
        if failed_at is None and not is_hang and watch.is_hang(ranks.running.values()):
            is_hang = True
            ranks.signal(signal.SIGTERM)
            ranks.signal(signal.SIGKILL)
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            ranks.signal(signal.SIGKILL)
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


def _play_rank(launch: Launch, rank: int, variables: Mapping[str, str]) -> NoReturn:
    output = os.open(launch.out / f"out_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    environ = environment(launch) | variables
    if launch.by == "exec":
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execve(sys.executable, [sys.executable, *launch.command], environ)
    become(environ, output, output)
    # In the cache folder, which runs share, only C++ is reused: each run compiles its own graphs.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    play(launch.command)


def play(command: Sequence[str]) -> NoReturn:
    """Run `python COMMAND` in this process, and end it as it would end."""
    is_module = command[0] == "-m"
    sys.argv = list(command[1:] if is_module else command)
    if is_module:
        end_as_python(lambda: runpy.run_module(command[1], run_name="__main__", alter_sys=True))
    end_as_python(lambda: runpy.run_path(command[0], run_name="__main__"))


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
