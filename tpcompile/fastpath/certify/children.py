"""Calls -> results, each from a forked process: a crash, an endless loop or a changed function stays there."""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tpcompile.errors import TpCompileError

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Ended:
    """How one call ended."""

    result: Any = None
    failure: str = ""
    """The exception, the signal that killed the process, or the time it was given; empty when it returned."""


@dataclass(frozen=True)
class _Child:
    index: int
    process: BaseProcess
    answer: Connection
    deadline: float


def in_children(calls: Iterable[Callable[[], Any]], *, jobs: int, timeout_s: float) -> list[Ended]:
    """Run every call in a forked process, `jobs` at a time; results in the order of the calls."""
    ended: dict[int, Ended] = {}
    running: list[_Child] = []
    left = enumerate(calls)
    while True:
        running += _started(left, jobs - len(running), timeout_s)
        if not running:
            return [ended[index] for index in sorted(ended)]
        next_deadline = min(child.deadline for child in running)
        wait([child.answer for child in running], timeout=max(0.0, next_deadline - time.monotonic()))
        for child in [child for child in running if _is_over(child)]:
            ended[child.index] = _end_of(child)
            running.remove(child)


def _started(left: Iterator[tuple[int, Callable[[], Any]]], number: int, timeout_s: float) -> list[_Child]:
    children = []
    for _ in range(number):
        index, call = next(left, (-1, None))
        if call is None:
            break
        answer, write = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_run, args=(call, write), daemon=True)
        process.start()
        write.close()
        children.append(_Child(index, process, answer, time.monotonic() + timeout_s))
    return children


def _run(call: Callable[[], Any], write: Connection) -> None:
    faulthandler.disable()  # a crash is a result here
    try:
        write.send(Ended(call()))
    except TpCompileError as error:
        write.send(Ended(failure=str(error)))
    except BaseException as error:  # whatever a broken kernel raises is its result
        write.send(Ended(failure=f"{type(error).__name__}: {error}"))


def _is_over(child: _Child) -> bool:
    return child.answer.poll() or time.monotonic() >= child.deadline


def _end_of(child: _Child) -> Ended:
    try:
        ended = child.answer.recv() if child.answer.poll() else Ended(failure="it did not end in its time")
    except EOFError:
        child.process.join()
        ended = Ended(failure=f"its process ended with status {child.process.exitcode}")
    child.process.kill()
    child.process.join()
    return ended
