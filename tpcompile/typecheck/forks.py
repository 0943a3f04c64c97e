"""Functions -> what each returned in a forked process of its own, all at the same time.

A fork has what this process has imported and made, so that small programs start at once and need not be pickled. A
process with threads may fork where the child starts none: torch gets one thread here, as in a DataLoader's workers.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

_POLL_S = 0.005


class ForkError(Exception):
    """A child raised, or did not end in time: the last line of its traceback."""


def can_fork() -> bool:
    """False where a process cannot be forked safely."""
    return hasattr(os, "fork") and sys.platform.startswith("linux")


def run_forked(functions: Sequence[Callable[[], Any]], *, timeout_s: float) -> list[Any]:
    """What the functions return, in their order; they must pickle.

    Raises ForkError for the first that raised, or with those that still run after `timeout_s` seconds; no child is left
    then.
    """
    with tempfile.TemporaryDirectory(prefix="tpcompile-forks-") as name:
        places = [Path(name) / str(number) for number in range(len(functions))]
        children: list[int] = []
        try:
            for function, place in zip(functions, places, strict=True):
                children.append(_forked(function, place))
            _wait(children, places, deadline=time.monotonic() + timeout_s)
        finally:
            _end(children)
        return [torch.load(place, weights_only=False) for place in places]


def _forked(function: Callable[[], Any], place: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        child = os.fork()
    if child:
        return child
    _be_child(function, place)


def _be_child(function: Callable[[], Any], place: Path) -> NoReturn:
    code = 1
    try:
        _quiet()
        torch.set_num_threads(1)
        result = function()
        torch.save(result, f"{place}.partial")
        os.rename(f"{place}.partial", place)
        code = 0
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip()
        with suppress(OSError):
            Path(f"{place}.error").write_text(text)
    finally:
        os._exit(code)  # no exit handlers: they are the parent's


def _quiet() -> None:
    """What the program prints, the check of its types has let it print already."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _wait(children: list[int], places: Sequence[Path], *, deadline: float) -> None:
    left = dict(zip(children, places, strict=True))
    while left:
        for child, place in list(left.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            children.remove(child)
            del left[child]
            if status:
                raise ForkError(_error_of(place))
        if left and time.monotonic() > deadline:
            raise ForkError(f"{len(left)} of {len(places)} processes did not end in time")
        time.sleep(_POLL_S)


def _error_of(place: Path) -> str:
    error = Path(f"{place}.error")
    return error.read_text() if error.exists() else "a process ended by a signal"


def _end(children: Sequence[int]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
