"""A call of `run_on_ranks` in a pytest session -> its ranks, forked from the server of the session."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tpcompile.pytest_plugin.causes import where
from tpcompile.pytest_plugin.files import STREAMS, Job, read_text
from tpcompile.pytest_plugin.session import Running, connect
from tpcompile.ranks.pool import Call, ExitCodes, run_rank, spawned

_STOPPED_S = 5.0
"""A rank that is stopped has ended by then."""


def start(config: pytest.Config, call: Call) -> AbstractContextManager[ExitCodes]:
    """Fork the ranks of a call; where the session cannot fork ranks, spawn them with a warning.

    Spawned ranks give the same results, only later, so that what the caller checks is still checked.
    """
    running = connect(config)
    if running.why_not:
        running.close()
        warnings.warn(f"ranks are spawned, which takes ten seconds more: {running.why_not}", stacklevel=4)
        return spawned(call)
    return _forked(call, running)


@contextmanager
def _forked(call: Call, running: Running) -> Iterator[ExitCodes]:
    with running:
        job = Job(
            folder=str(call.folder),
            world_size=call.world_size,
            target=f"{__name__}:run",
            arguments=pickle.dumps((call.fn, call.args)),
            timeout_s=call.collective_timeout_s,
        )
        running.start(job)
        try:
            yield running.exit_codes
        except TimeoutError as error:
            late = [rank for rank, code in enumerate(running.codes) if code is None]
            running.stop(late)
            running.is_served(_STOPPED_S)
            for rank in late:
                error.add_note(f"rank {rank} is at {where(read_text(job.files.stack(rank)))}")
            raise
        finally:
            running.close()  # before the output is read
            for rank in range(job.world_size):
                for stream in STREAMS:  # where spawned ranks write by themselves
                    for line in read_text(job.files.output(rank, stream)).splitlines():
                        print(f"[rank {rank}] {line}", file=getattr(sys, stream))


# In the process of a rank


def run(job: Job, rank: int, variables: Mapping[str, str]) -> int:
    """Run the call of the job on this rank. Returns the exit code of the process."""
    os.environ.update(variables)
    call = Call(
        fn=_run_pickled,
        args=(job.arguments,),
        world_size=job.world_size,
        collective_timeout_s=job.timeout_s,
        folder=Path(job.folder),
    )
    return run_rank(call, rank)


def _run_pickled(call: bytes) -> Any:
    fn, args = pickle.loads(call)
    return fn(*args)
