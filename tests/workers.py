"""Workers of pytest-xdist, forked from the session, which has imported torch: each has 3 s of CPU time less to do."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from tests import forked

MODULES = ("hypothesis", "torch._dynamo", "torch._inductor.graph", "torch.distributed.tensor", "triton.language")
"""What the test files import, beside what they test."""
OURS = ("tests", "tpcompile")
"""A worker imports these itself: pytest rewrites their assertions, and tests change them."""
_POPEN = subprocess.Popen


def fork_from(config: pytest.Config) -> None:
    """Let the workers of this session, if it has any, be forks of it."""
    if hasattr(config, "workerinput") or not getattr(config.option, "tx", None):
        return
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    subprocess.Popen = _Popen  # type: ignore[misc]


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A worker is forked; anything else is started as ever."""

    def __init__(self, command: Any, **options: Any) -> None:
        words = [command] if isinstance(command, str) else list(command)
        if words[0] == sys.executable and words[-1] == forked.WORKER:
            options["preexec_fn"] = _become_worker
        super().__init__(command, **options)


def _become_worker() -> NoReturn:
    """In the child, where `exec` would follow: what is left of the session is what it has imported."""
    subprocess.Popen = _POPEN  # type: ignore[misc]
    # As Python has them from its start; `subprocess` has just reset them: a write to a closed socket would end this.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    atexit._clear()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    forked.close_on_exec()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    exec(forked.WORKER, {"__name__": "__main__"})
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(0)
