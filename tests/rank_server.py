"""Job -> a process, forked by the pytest plugin's server of ranks; with the interface of multiprocessing."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.interpreting import import_triton_as_asked
from tpcompile.pytest_plugin import launcher
from tpcompile.pytest_plugin.files import Job
from tpcompile.pytest_plugin.session import HAS_ENDED, Running

_CONFIG: list[pytest.Config] = []


def use(config: pytest.Config) -> None:
    """Fork from the server of this session."""
    _CONFIG[:] = [config]


def job(
    folder: Path,
    target: str,
    arguments: dict[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Job:
    """A process that calls `target`; what it leaves running is for the test to find."""
    return Job(
        folder=str(folder),
        world_size=1,
        target=target,
        arguments=arguments,
        environ=dict(environ),
        cwd=str(cwd or Path.cwd()),
        sys_path=tuple(sys.path),
        timeout_s=0.0,
        is_swept=False,
    )


class Process:
    """What the tests use of a `multiprocessing.Process`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._running: Running | None = None
        self._code: int | None = None
        self.pid: int | None = None

    def start(self) -> None:
        """Fork it."""
        self._running = launcher.start_server(_CONFIG[0]).connect()
        if not self._running.why_not:
            self._running.start(self._job)
        if not self._running.pids:
            raise RuntimeError(f"no rank can be started: {self._running.why_not or HAS_ENDED}")
        (self.pid,) = self._running.pids

    @property
    def exitcode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        if self._code is None and not self._is_running():
            self._code = self._read_code()
        return self._code

    def _is_running(self, timeout_s: float | None = 0.0) -> bool:
        assert self._running is not None
        return self._running.is_served(timeout_s)

    def _read_code(self) -> int:
        assert self._running is not None
        path = self._job.files.exit(0)
        if not path.exists():
            raise RuntimeError(f"{HAS_ENDED}, and its ranks with it")
        self._running.close()
        return int(path.read_text())

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        if self._code is None:
            self._is_running(timeout_s)

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError, RuntimeError):
            if self.exitcode is None and self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)


class Call(Process):
    """A function of the top level of a module, with its arguments."""

    def __init__(self, target: Callable[..., object], args: Iterable[object] = (), daemon: bool = False) -> None:
        folder = Path(tempfile.mkdtemp(prefix="tpcompile-tests-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        (folder / "call").write_bytes(pickle.dumps((target, tuple(args))))
        super().__init__(job(folder, "tests.rank_server:call", {}))


def call(job: Job, rank: int, variables: Mapping[str, str]) -> int:
    """In the forked process."""
    import_triton_as_asked()
    function, arguments = pickle.loads(Path(job.folder, "call").read_bytes())
    function(*arguments)
    return 0


class Context:
    """What the tests use of a context of multiprocessing."""

    Process = Call
