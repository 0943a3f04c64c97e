"""A call of `run_on_ranks` in a pytest session -> its ranks, forked from the server of the session.

The interface of a start is in `tpcompile.ranks.starts`; what a rank does, in `tpcompile.ranks.pool`.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tpcompile.pytest_plugin import launcher
from tpcompile.pytest_plugin.causes import where
from tpcompile.pytest_plugin.files import SHOW_STACK, STREAMS, Job, read_text
from tpcompile.pytest_plugin.server import ENVIRON
from tpcompile.pytest_plugin.session import Running
from tpcompile.ranks.pool import run_rank, spawned
from tpcompile.ranks.starts import Call, ExitCodes

_CALL = "call"
"""File with the function and its arguments."""
_STOPPED_S = 5.0
"""A rank that is stopped has ended by then."""
_POLL_S = 0.02


def start(config: pytest.Config, call: Call) -> AbstractContextManager[ExitCodes]:
    """Fork the ranks of a call; where the session cannot fork ranks, spawn them with a warning.

    Spawned ranks give the same results, only later, so that what the caller checks is still checked.
    """
    running = launcher.start_server(config).connect()
    if running.why_not:
        running.close()
        warnings.warn(f"ranks are spawned, which takes ten seconds more: {running.why_not}", stacklevel=4)
        return spawned(call)
    return _forked(call, running)


@contextmanager
def _forked(call: Call, running: Running) -> Iterator[ExitCodes]:
    job = _job(call)
    with running:
        (call.folder / _CALL).write_bytes(pickle.dumps((call.fn, call.args)))
        running.start(job)
        try:
            yield running.exit_codes
        except TimeoutError as error:
            for line in _stop(job):
                error.add_note(line)
            raise
        finally:
            running.close()  # before the output is read
            _print_output(job)


def _stop(job: Job) -> Iterator[str]:
    """Stop the ranks that still run; the lines at which they are."""
    late = [rank for rank, code in enumerate(job.exit_codes()) if code is None]
    for rank in late:
        job.files.stop(rank).touch()
    deadline_s = time.monotonic() + _STOPPED_S
    while None in job.exit_codes() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for rank in late:
        yield f"rank {rank} is at {where(read_text(job.files.stack(rank)))}"


def _print_output(job: Job) -> None:
    """Where the output of spawned ranks would be."""
    for rank in range(job.world_size):
        for stream in STREAMS:
            for line in read_text(job.files.output(rank, stream)).splitlines():
                print(f"[rank {rank}] {line}", file=getattr(sys, stream))


def _job(call: Call) -> Job:
    return Job(
        folder=str(call.folder),
        world_size=call.world_size,
        target=f"{__name__}:run",
        arguments={},
        environ={**ENVIRON, **os.environ},
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
        timeout_s=call.collective_timeout_s,
    )


# In the process of a rank


def run(job: Job, rank: int, variables: Mapping[str, str]) -> int:
    """Run the call of the job on this rank. Returns the exit code of the process."""
    os.environ.update(variables)
    call = Call(
        fn=_run_pickled,
        args=(job.folder,),
        world_size=job.world_size,
        collective_timeout_s=job.timeout_s,
        folder=Path(job.folder),
    )
    with job.files.stack(rank).open("w") as stack:
        faulthandler.register(SHOW_STACK, file=stack, all_threads=False)
        return run_rank(call, rank)


def _run_pickled(folder: str) -> Any:
    fn, args = pickle.loads(Path(folder, _CALL).read_bytes())
    return fn(*args)
