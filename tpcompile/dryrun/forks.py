"""One process for each rank, forked from one that has imported torch and the target -> what each rank left.

A rank shares nothing with the ranks before it: no cache of Dynamo or DTensor, no module global of the user's. The
cost is that of a fork. The first rank is watched: where nothing outside of torch reads the rank, the program is the
same one on all ranks, and those of the first and the last group are traced.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from tpcompile.dryrun.plan import Plan
from tpcompile.dryrun.reads import traced_reads, watched_reads
from tpcompile.dryrun.trace import forget_users_modules, installed_modules, traced
from tpcompile.dryrun.warm import generate_once, warm_up
from tpcompile.errors import TpCompileError
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import Check, Frozen, Layer, RankDigest, UserLine
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
    reads: tuple[UserLine, ...] = ()
    """Lines outside of torch that read the rank, of the rank that was watched."""
    imported: tuple[str, ...] = ()
    """Modules of installed packages that it imported."""


class Ended(NamedTuple):
    """A rank whose process has ended."""

    rank: int
    left: Left | None
    """None where it died, or was killed at its limit."""
    how: str = ""


def trace_ranks(plan: Plan, run_dir: RunDir, *, jobs: int, limit_s: float) -> Iterator[Ended]:
    """Trace the ranks of the plan, `jobs` at a time, each for `limit_s` seconds at most; the first one alone.

    A rank's record is in the run directory when it is yielded. What it printed is in logs/rank_N.txt.
    """
    torch.set_num_threads(1)
    if plan.arch:
        generate_once()
    else:
        warm_up(plan.world_size + 1)
    (first,) = _traced(plan, plan.ranks[:1], run_dir, jobs=1, limit_s=limit_s)
    yield first
    left = first.left
    for name in left.imported if left is not None else ():
        with suppress(ImportError):  # the rank tried it, too
            importlib.import_module(name)
    is_alike = left is not None and left.digest is not None and not left.reads and not left.failed
    ranks = plan.when_alike() if is_alike else plan.ranks
    yield from _traced(plan, ranks[1:], run_dir, jobs=jobs, limit_s=limit_s)


def _traced(plan: Plan, ranks: Sequence[int], run_dir: RunDir, *, jobs: int, limit_s: float) -> Iterator[Ended]:
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what the ranks share
    waiting = list(reversed(ranks))
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
    before = installed_modules()
    is_first = rank == plan.ranks[0]
    watch: AbstractContextManager[dict[UserLine, None]] = watched_reads() if is_first else nullcontext({})
    try:
        with watch as reads:
            found = traced(plan, rank)
    except TpCompileError as error:
        left = Left(refused=str(error))
    else:
        run_dir.write_record(found.record)
        allow = tuple((Layer(layer), text, why) for layer, text, why in found.allow)
        digest = digest_rank(found.record)
        lines = tuple({**reads, **traced_reads(digest)})
        imported = tuple(name for name in installed_modules() if name not in before)
        left = Left(digest=digest, allow=allow, failed=found.failed, reads=lines, imported=imported)
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
