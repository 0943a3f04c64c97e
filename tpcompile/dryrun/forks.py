"""Ranks, and what is asked of each -> what their processes left, each forked from one that has imported torch.

A rank shares nothing with the ranks before it: no cache of Dynamo or DTensor, no module global of the user's. The
cost is that of a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from tpcompile.dryrun.plan import Asked, Plan
from tpcompile.dryrun.rank import Left, leave, left_name
from tpcompile.dryrun.trace import users_modules
from tpcompile.evidence.records.reader import read_json, validated
from tpcompile.evidence.rundir import RunDir
from tpcompile.ranks.pool import end_with_parent

_POLL_S = 0.002
_ALLOCATED = 50_000
"""Objects more than were freed, after which a rank looks for garbage: it lives for seconds."""
_STOPS = {signal.SIGINT, signal.SIGTERM}


class Ended(NamedTuple):
    """A rank whose process has ended."""

    rank: int
    left: Left | None
    """None where it died, or was killed at its limit."""
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Forks:
    """The processes of a job: `jobs` at a time, each for `limit_s` seconds at most."""

    plan: Plan
    run_dir: RunDir
    jobs: int
    limit_s: float

    def run(self, ranks: Sequence[int], ask: Callable[[int], Asked]) -> Iterator[Ended]:
        """Yield the ranks as they end; `ask` is called when a rank begins.

        A rank's record is in the run directory when it is yielded. What it printed is in logs/rank_N.txt. A rank is a
        process group of its own, which is killed with what the user's program started in it when the rank has ended.
        """
        if not ranks:
            return  # a collection takes 0.2 s
        users = tuple(users_modules())
        gc.collect()
        gc.freeze()  # a collection in a rank would copy every page of what the ranks share
        waiting = list(reversed(ranks))
        running: dict[int, tuple[int, float]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    rank = waiting.pop()
                    running[self._fork(rank, replace(ask(rank), users_modules=users))] = (
                        rank,
                        time.monotonic() + self.limit_s,
                    )
                yield from self._ended(running)
                time.sleep(_POLL_S)
        finally:
            gc.unfreeze()
            for pid in running:
                _kill(pid)
                os.waitpid(pid, 0)

    def _ended(self, running: dict[int, tuple[int, float]]) -> Iterator[Ended]:
        for pid, (rank, deadline_s) in list(running.items()):
            done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if done is None and time.monotonic() < deadline_s:
                continue
            _kill(pid)  # before it is waited for: no other process can have its number until then
            _, status = os.waitpid(pid, 0)
            del running[pid]
            code = os.waitstatus_to_exitcode(status)
            how = f"its process ended with {code}" if done else f"traced for {self.limit_s:g} s"
            left = self._read(rank) if done and code == 0 else None
            yield Ended(rank, left, f"{how}; see {_log(self.run_dir, rank)}")

    def _fork(self, rank: int, asked: Asked) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Python drops what is raised in the handlers that modules have around a fork: Ctrl-C would be lost there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        pid = os.fork()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid == 0:
            self._run_rank(rank, asked, parent)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # by both, whichever is first
        return pid

    def _run_rank(self, rank: int, asked: Asked, parent: int) -> NoReturn:
        """Trace the rank and end the process. An exception is in its log, and an exit code."""
        code = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end_with_parent()
            if os.getppid() == parent:
                # What the user's program prints would be in the output once for each rank.
                log = os.open(_log(self.run_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                # Makes the thread pool anew that a fork leaves broken: two threads of autograd at once find none.
                torch.set_num_threads(1)
                gc.set_threshold(_ALLOCATED)
                leave(self.plan, rank, self.run_dir, asked)
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _read(self, rank: int) -> Left:
        path = self.run_dir.path / left_name(rank)
        left = validated(Left, read_json(path), path)
        path.unlink()
        with suppress(OSError):  # it has a record
            path.parent.rmdir()
        return left


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group does not exist before the rank, or we, have made it
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _log(run_dir: RunDir, rank: int) -> Path:
    return run_dir.logs / f"rank_{rank}.txt"
