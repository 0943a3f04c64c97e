"""Calls -> results, each from a forked process, so that a crash, an endless loop or a mutation ends with it.

A fork has what this process has imported and made, so that small programs start at once and need not be pickled.
"""

from __future__ import annotations

import faulthandler
import io
import math
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tpcompile.errors import TpCompileError

_FORK = multiprocessing.get_context("fork")
_SLEEPING = 20
"""Seconds by the clock for each second of CPU time, after which a child is ended that sleeps and uses none."""
_TOO_LONG = "it did not end in its time"


@dataclass(frozen=True)
class Ended:
    """How one call ended."""

    result: Any = None
    failure: str = ""
    """The exception, the status of a process that died, or that its time was over; empty for a call that returned."""


@dataclass(frozen=True)
class _Child:
    index: int
    process: BaseProcess
    answer: Connection
    deadline: float


def in_children(
    calls: Iterable[Callable[[], Any]], *, jobs: int, cpu_s: float, on_end: Callable[[int], None] | None = None
) -> list[Ended]:
    """Run every call in a forked process, `jobs` at a time; results in the order of the calls.

    A call is ended after `cpu_s` of CPU time, so that none fails because the machine is busy, or after twenty times as
    long by the clock, for one that sleeps. `on_end` is called with the number of calls that have ended.
    """
    ended: dict[int, Ended] = {}
    for index, found in as_they_end(calls, jobs=jobs, cpu_s=cpu_s, clock_s=_SLEEPING * cpu_s):
        ended[index] = found
        if on_end is not None:
            on_end(len(ended))
    return [ended[index] for index in sorted(ended)]


def as_they_end(
    calls: Iterable[Callable[[], Any]], *, jobs: int, cpu_s: float, clock_s: float
) -> Generator[tuple[int, Ended], None, None]:
    """The number of each call and how it ended, `jobs` at a time; those that run are killed when this is closed."""
    running: list[_Child] = []
    left = enumerate(calls)
    try:
        while True:
            running += _started(left, jobs - len(running), cpu_s, clock_s)
            if not running:
                return
            first_deadline = min(child.deadline for child in running)
            wait([child.answer for child in running], timeout=max(0.0, first_deadline - time.monotonic()))
            for child in list(running):
                is_over = child.answer.poll() or time.monotonic() >= child.deadline
                if is_over:
                    running.remove(child)
                    yield child.index, _end_of(child)
    finally:
        for child in running:
            child.process.kill()
            child.process.join()


def _started(left: Iterator[tuple[int, Callable[[], Any]]], number: int, cpu_s: float, clock_s: float) -> list[_Child]:
    children = []
    for _ in range(number):
        index, call = next(left, (-1, None))
        if call is None:
            break
        answer, write = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_run, args=(call, write, math.ceil(cpu_s), math.ceil(clock_s)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
            process.start()
        write.close()
        children.append(_Child(index, process, answer, time.monotonic() + clock_s))
    return children


def _run(call: Callable[[], Any], write: Connection, cpu_s: int, clock_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    signal.alarm(clock_s + 1)  # should its parent be killed before it
    faulthandler.disable()  # a crash is a result here, and the C library's text on it is not for users
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    saved = io.BytesIO()
    try:
        torch.save(Ended(call()), saved)  # by value: a pipe would pass memory of tensors, which ends with the child
    except BaseException as error:  # whatever a broken kernel raises is its result
        kind = "" if isinstance(error, TpCompileError) else f"{type(error).__name__}: "
        saved = io.BytesIO()
        torch.save(Ended(failure=f"{kind}{error}"), saved)
    write.send_bytes(saved.getvalue())


def _end_of(child: _Child) -> Ended:
    try:
        ended = Ended(failure=_TOO_LONG)
        if child.answer.poll():
            ended = torch.load(io.BytesIO(child.answer.recv_bytes()), weights_only=False)
    except EOFError:
        child.process.join()
        status = child.process.exitcode
        is_late = status == -signal.SIGXCPU
        ended = Ended(failure=_TOO_LONG if is_late else f"its process ended with status {status}")
    child.process.kill()
    child.process.join()
    return ended
