"""A rank with its process group -> watched until its group is destroyed, or its program ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tpcompile.errors import TpCompileError
from tpcompile.evidence.rundir import RunDir
from tpcompile.sentinel import Sentinel
from tpcompile.sentinel.sink import logger
from tpcompile.watched import SETTINGS, Settings, Watched, interrupted_file, watched_file

_POLL_S = 0.3
_SENTINELS: list[Sentinel] = []
"""That of this process, while it is watched."""


def start() -> None:
    """Watch this rank, if it has others; a job that cannot be watched goes on without."""
    settings = Settings.from_json(os.environ[SETTINGS])
    if _SENTINELS or dist.get_world_size() < 2:
        return
    try:
        sentinel = Sentinel(
            policy=settings.policy, run_dir=settings.run_dir, follow=settings.follow, flow=settings.flow, prints=False
        )
        sentinel.__enter__()
    except (TpCompileError, RuntimeError) as error:
        logger.warning("this rank is not watched: {}", error)
        return
    _SENTINELS.append(sentinel)
    sentinel.gives_way = _give_way
    _note(sentinel)
    threading.Thread(target=_say_when_interrupted, args=(sentinel,), name="tpcompile-run", daemon=True).start()
    before = sys.excepthook

    def raised(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        end(error)
        before(kind, error, tb)

    sys.excepthook = raised
    atexit.register(end)


def end(error: BaseException | None = None) -> None:
    """Stop watching; ranks that leave compare what they compiled."""
    while _SENTINELS:
        sentinel = _SENTINELS.pop()
        # What this rank did, for the page of the run: the flight recorder ends with the process.
        with suppress(OSError, RuntimeError, TpCompileError):
            directory = RunDir(Settings.from_json(os.environ[SETTINGS]).run_dir)
            directory.write_text(f"streams/rank_{sentinel.rank}.json", sentinel.stream().to_json())
        tb = error.__traceback__ if error is not None else None
        try:
            sentinel.__exit__(type(error) if error is not None else None, error, tb)
        finally:
            _note(sentinel, has_ended=True)


def _say_when_interrupted(sentinel: Sentinel) -> None:
    """Wait until the launcher writes that somebody ends the job, and say for whom this rank has waited."""
    file = interrupted_file(Path(Settings.from_json(os.environ[SETTINGS]).run_dir))
    while sentinel in _SENTINELS:
        if file.exists():
            with suppress(RuntimeError):
                sentinel.interrupted()
            _note(sentinel, has_looked=True)
            return
        time.sleep(_POLL_S)


def _give_way() -> None:
    """End before the program starts a sentinel of its own, on all ranks at the same place."""
    for sentinel in list(_SENTINELS):
        end()
        _note(sentinel, has_ended=True, gave_way=True)


def _note(sentinel: Sentinel, *, has_ended: bool = False, gave_way: bool = False, has_looked: bool = False) -> None:
    """Write what was watched of this rank, for what the launcher says last."""
    facts = Watched(
        compiles=sentinel.stats["compiles"],
        world_size=sentinel.world_size,
        has_ended=has_ended,
        job=sentinel.job,
        gave_way=gave_way,
        has_looked=has_looked,
        findings=tuple(verdict.summary for verdict in sentinel.findings),
    )
    with suppress(OSError):
        file = watched_file(Path(Settings.from_json(os.environ[SETTINGS]).run_dir), sentinel.rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(facts.model_dump_json())
