"""`python -m tests.bench.forked MODULE ARGUMENTS`: as `python -m MODULE ARGUMENTS`, its server of ranks forked from it.

A new interpreter would import torch once more.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

from tests.forked import close_on_exec
from tpcompile.bench import processes


def _fork(_path: object, command: Sequence[str], kept: Sequence[int]) -> int:
    """Stands for `spawnv_passfds`: runs the code of `python -c CODE`."""
    pid = os.fork()
    if pid:
        return pid
    for file in kept:
        os.set_inheritable(file, True)
    close_on_exec()
    with suppress(SystemExit):
        exec(command[-1], {})
    os._exit(0)


@functools.cache
def _start() -> None:
    """Before the first store: ranks would inherit the locks of its thread."""
    forkserver.ensure_running()
    atexit.register(_stop)


def _stop() -> None:
    """Wait for what was forked, which ends when this process does, but later; Python has no public name for that."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # not in the stubs
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # not in the stubs


def _context(is_gpu: bool, context_of: Any = processes._context) -> Any:
    context = context_of(is_gpu)
    _start()
    return context


if __name__ == "__main__":
    util.spawnv_passfds = _fork
    processes._context = _context
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
