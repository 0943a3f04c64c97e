"""Command -> Outcome: one process tree, all of it ended at timeout, SIGINT, SIGTERM, or when the launcher is killed.

Beside `tpcompile.ranks.pool`, which starts ranks by itself, and not in it: the launcher and the commands start without
torch, and import-linter counts every import of a module of `ranks`, in functions too.

What is guaranteed when `run_tree` returns or raises: no process of the tree runs, even in a session of its own or when
its parent has ended; a signal, or the end of time, was forwarded first, with `grace_s` to write a verdict; every line
on stderr was handed over. When the launcher is killed with SIGKILL, a watchdog kills its tree.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

import psutil
from loguru import logger

GRACE_S = 15.0
"""Seconds between the signal that asks torchrun to end and the SIGKILL of everything left."""

LAUNCH_ID = "TPCOMPILE_LAUNCH_ID"
"""Environment variable that marks every process of one launch: torchrun gives each rank a session of its own,
so killing torchrun's process group alone leaves ranks behind."""

_READ_S = 5.0
"""Seconds for the last lines of processes that have ended."""
_SWEEP_S = 5.0
_POLL_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a process tree ended."""

    exit_code: int
    timed_out: bool = False
    signal: int = 0
    """Signal that stopped the launcher, 0 for none."""


def run_tree(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float | None,
    grace_s: float | None = None,
    stdout: TextIO | None = None,
    on_line: Callable[[str], None] | None = None,
    on_signal: Callable[[], None] | None = None,
) -> Outcome:
    """Run a command, its output streamed; end it and all processes that it started at timeout, SIGINT or SIGTERM.

    Without a `timeout_s` it may run for ever.

    Its stdout goes to `stdout`, by default that of this process; with `on_line`, every line that it and its children
    write to stderr goes there instead, on a thread. `on_signal` is called before a SIGINT or SIGTERM is forwarded: what
    is written to stderr from then on is how the processes end.
    """
    grace_s = GRACE_S if grace_s is None else grace_s
    launch_id = uuid.uuid4().hex
    stderr = subprocess.PIPE if on_line else None
    with _watched(launch_id), _signals_raised() as signals:
        process, reader = None, None
        try:
            process = subprocess.Popen(
                command, env={**environ, LAUNCH_ID: launch_id}, start_new_session=True, stdout=stdout, stderr=stderr
            )
            if on_line is not None and process.stderr is not None:
                reader = threading.Thread(target=_read, args=(process.stderr, on_line), daemon=True)
                reader.start()
            return Outcome(exit_code=process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            logger.warning("still running after {} s; stopping all ranks", timeout_s)
            return Outcome(exit_code=_stop(process, signal.SIGTERM, grace_s, signals), timed_out=True)
        except _Signalled as stopped:
            if on_signal is not None:
                on_signal()
            return Outcome(exit_code=_stop(process, stopped.signum, grace_s, signals), signal=stopped.signum)
        finally:
            for signum in _SIGNALS:
                signal.signal(signum, signal.SIG_IGN)  # the sweep takes milliseconds and must not be interrupted
            _sweep_launch(launch_id)
            if reader is not None:
                reader.join(timeout=_READ_S)


def _read(stream: IO[bytes], on_line: Callable[[str], None]) -> None:
    """Hand over every line, until the last process that holds the other end has ended."""
    for line in stream:
        on_line(line.decode(errors="replace").rstrip("\r\n"))


@contextmanager
def _watched(launch_id: str) -> Iterator[None]:
    """Run a watchdog process that ends the tree when this process has ended, e.g. by a SIGKILL."""
    command = [sys.executable, "-m", "tpcompile.process_tree", launch_id]
    path = os.environ.get("PYTHONPATH")
    environ = {**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else _ROOT}
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, start_new_session=True)
    try:
        yield
    finally:
        watchdog.kill()
        watchdog.communicate()


class _Signalled(Exception):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def _signals_raised() -> Iterator[list[int]]:
    """Raise the first signal as `_Signalled`; it and all later ones are in the list."""
    signals: list[int] = []

    def receive(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        if len(signals) == 1:  # a second one must not interrupt what ends the tree
            raise _Signalled(signum)

    before = {signum: signal.signal(signum, receive) for signum in _SIGNALS}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _stop(process: subprocess.Popen[bytes] | None, signum: int, grace_s: float, signals: list[int]) -> int:
    """Forward a signal, wait `grace_s` (a further signal ends the wait), then SIGKILL."""
    if process is None:
        return 128 + signum
    signals[:] = [signum]  # from here on none is raised
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
    ends_s = time.monotonic() + grace_s
    while process.poll() is None and len(signals) == 1 and time.monotonic() < ends_s:
        time.sleep(_POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def sweep(is_meant: Callable[[psutil.Process], bool]) -> tuple[str, ...]:
    """SIGKILL every process that is meant, for 5 s or until none runs; returns their command lines."""
    killed: dict[psutil.Process, str] = {}
    deadline_s = time.monotonic() + _SWEEP_S
    while left := _running(is_meant):
        for process in left:
            with suppress(psutil.Error):
                killed.setdefault(process, " ".join(process.cmdline()))
                process.kill()
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    return tuple(killed.values())


def _running(is_meant: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is of a different user
            if is_meant(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _sweep_launch(launch_id: str) -> None:
    """End the processes that carry the mark of a launch, also those whose parent has ended."""
    sweep(lambda process: process.environ().get(LAUNCH_ID) == launch_id)


if __name__ == "__main__":
    os.read(0, 1)  # returns when the launcher's end of the pipe is closed
    _sweep_launch(sys.argv[1])
