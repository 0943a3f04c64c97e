"""One process for each rank, forked from one that has imported torch and the target -> what each rank left.

A rank shares nothing with the ranks before it: no cache of Dynamo or DTensor, no module global of the user's. The cost is
that of a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from tpcompile.dryrun.plan import Plan
from tpcompile.dryrun.trace import forget_users_modules, traced
from tpcompile.dryrun.warm import warm_up
from tpcompile.errors import TpCompileError
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import Check, Frozen, Layer, RankDigest
from tpcompile.evidence.records.reader import read_json, validated
from tpcompile.evidence.rundir import RunDir
from tpcompile.ranks.env import local_variables
from tpcompile.ranks.pool import end_with_parent

_RANKS_PER_NODE = 8
"""LOCAL_RANK and LOCAL_WORLD_SIZE of a rank are those of nodes of so many."""
_PORT = 29500
"""MASTER_PORT, which nobody serves: the store of a fake group is none."""
_POLL_S = 0.005


class Left(Frozen):
    """What the process of a rank leaves beside its record."""

    digest: RankDigest | None = None
    allow: tuple[tuple[Layer, str, str], ...] = ()
    failed: Check | None = None
    refused: str = ""
    """Why the target cannot be built, one line; there is no digest then."""


class Ended(NamedTuple):
    """A rank whose process has ended."""

    rank: int
    left: Left | None
    """None where it died, or was killed at its limit."""
    how: str = ""


def trace_ranks(plan: Plan, run_dir: RunDir, *, jobs: int, limit_s: float) -> Iterator[Ended]:
    """Trace the ranks of the plan, `jobs` at a time, each for `limit_s` seconds at most.

    A rank's record is in the run directory when it is yielded. What it printed is in logs/rank_N.txt.
    """
    torch.set_num_threads(1)
    warm_up(plan.world_size + 1)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what the ranks share
    waiting = list(reversed(plan.ranks))
    running: dict[int, tuple[int, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                rank = waiting.pop()
                running[_fork(plan, rank, run_dir)] = rank, time.monotonic() + limit_s
            yield from _ended(running, run_dir, limit_s)
            time.sleep(_POLL_S)
    finally:
        gc.unfreeze()
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ended(running: dict[int, tuple[int, float]], run_dir: RunDir, limit_s: float) -> Iterator[Ended]:
    for pid, (rank, deadline_s) in list(running.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and time.monotonic() < deadline_s:
            continue
        if not done:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        del running[pid]
        code = os.waitstatus_to_exitcode(status)
        how = f"traced for {limit_s:g} s" if not done else f"its process ended with {code}"
        yield Ended(rank, _read(run_dir, rank) if code == 0 else None, f"{how}; see {_log(run_dir, rank)}")


def _fork(plan: Plan, rank: int, run_dir: RunDir) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_rank(plan, rank, run_dir, parent)
    return pid


def _run_rank(plan: Plan, rank: int, run_dir: RunDir, parent: int) -> NoReturn:
    """Trace the rank and end the process. An exception is in its log, and an exit code."""
    code = 1
    try:
        end_with_parent()
        if os.getppid() == parent:
            _redirect(_log(run_dir, rank))
            os.environ.update(_variables(plan, rank))
            _leave(plan, rank, run_dir)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave(plan: Plan, rank: int, run_dir: RunDir) -> None:
    forget_users_modules()
    try:
        found = traced(plan, rank, lowers=plan.lowers(rank))
    except TpCompileError as error:
        left = Left(refused=str(error))
    else:
        run_dir.write_record(found.record)
        allow = tuple((Layer(layer), text, why) for layer, text, why in found.allow)
        left = Left(digest=digest_rank(found.record), allow=allow, failed=found.failed)
    run_dir.write_text(_left(rank), left.model_dump_json())


def _variables(plan: Plan, rank: int) -> Mapping[str, str]:
    """What torchrun sets for this rank, on nodes of 8."""
    on_node = min(_RANKS_PER_NODE, plan.world_size)
    local = {"LOCAL_RANK": str(rank % on_node), "LOCAL_WORLD_SIZE": str(on_node)}
    return {**local_variables(rank, plan.world_size, _PORT), **local}


def _redirect(log: Path) -> None:
    """What the user's program prints would be in the output once for each rank."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _log(run_dir: RunDir, rank: int) -> Path:
    return run_dir.logs / f"rank_{rank}.txt"


def _left(rank: int) -> str:
    return f"rank_{rank}/left.json"


def _read(run_dir: RunDir, rank: int) -> Left:
    path = run_dir.path / _left(rank)
    left = validated(Left, read_json(path), path)
    path.unlink()
    return left
