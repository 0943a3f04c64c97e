"""A group on one host -> the table whose cell its ranks agreed on: what one of them has kept, else measured together.

A rank looks for the cell in the job's store, where groups that came before have put theirs, in the cache of the
machine, and in the table that ships. The first cell of the lowest rank that has one counts. Where none has one, all
measure, which takes some seconds once per machine, GPU, number of ranks, and release of torch, NCCL and driver. This is
at the setup of a program and never while one is compiled: there a rank may be alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.by_size import tuning
from tpcompile.by_size.table import Cell, Table, shipped
from tpcompile.errors import TpCompileError
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.rundir import temporary
from tpcompile.evidence.text.ranks import exact_ranks, named_ranks
from tpcompile.private_folder import cache_folder
from tpcompile.ranks.agree import agree
from tpcompile.ranks.processes import Processes
from tpcompile.ranks.store import RankStore
from tpcompile.sink import Sink

logger = Sink("sums by size")
TUNE = "TPCOMPILE_TUNE"
"""Variable: with 0 nothing is measured at the setup of a program, and NCCL makes sums that have no cell."""
_LEAST_FREE_BYTES = 3 << 30
"""Memory of the GPU without which a rank does not measure: one that ran out of it would leave the others waiting."""
_NUMBERS: Counter[str] = Counter()
Measure = Callable[[], Cell]


class Brought(Frozen):
    """What a rank has, or why it has nothing."""

    gpu: str
    cell: Cell | None = None
    obstacle: str = ""
    """Why it cannot measure, or could not."""


class Settled(Frozen):
    """What all ranks use: a cell; a problem, for which NCCL makes all sums; or neither, and they measure."""

    cell: Cell | None = None
    problem: str = ""
    speaks: int = 0
    """The rank that warns of the problem."""


class Tuned(Frozen):
    """The table of a group, and how it came to it."""

    table: Table
    cell: Cell | None
    """None where NCCL makes all sums, for a problem that was warned of."""
    measured_s: float | None = None
    """Seconds that the measurement took; None where a rank had the cell."""
    file: Path | None = None
    """Where the machine keeps it; None where there is no place for it."""


def settle(brought: Mapping[int, Brought], absent: Mapping[int, str], *, has_measured: bool = False) -> Settled:
    """What the ranks do: after a measurement all must have a cell, and before it one is enough."""
    problem = "; ".join(_problems(brought, absent))
    cells = [one.cell for one in brought.values() if one.cell is not None]
    obstacles = {rank: one.obstacle for rank, one in brought.items() if one.obstacle}
    if not problem and obstacles and (has_measured or not cells):
        alike = grouped(obstacles, obstacles.__getitem__)
        problem = "; ".join(f"{named_ranks(ranks)}: {why}" for why, ranks in alike.items())
    if problem:
        return Settled(problem=problem, speaks=min(brought))
    return Settled(cell=cells[0] if cells else None)


def _problems(brought: Mapping[int, Brought], absent: Mapping[int, str]) -> list[str]:
    found = [f"{named_ranks(sorted(absent))} did not come in time"] if absent else []
    gpus = grouped(brought, lambda rank: brought[rank].gpu)
    if len(gpus) > 1:
        found.append(" / ".join(f"{gpu} on {named_ranks(ranks)}" for gpu, ranks in gpus.items()))
    return found


def tuned(
    group: dist.ProcessGroup, gpu: str, measure: Measure, *, timeout_s: float, anew: bool = False, obstacle: str = ""
) -> Tuned:
    """Every rank of the group calls it; with `anew` they measure whatever they have.

    measure: collective, at most once.
    timeout_s: how long a rank waits for the others, before the measurement and after their own.
    obstacle: why this rank does not measure.

    Where a rank does not come, has ended, cannot measure or has a different GPU, all use NCCL, and one of them warns.
    Raises RuntimeError when the job's store cannot be reached.
    """
    ranks = sorted(dist.get_process_group_ranks(group))
    members, place = exact_ranks(ranks), f"{len(ranks)} x {gpu}"
    _NUMBERS[members] += 1
    job = RankStore.of_job("tpcompile/by_size")
    store = job.under(f"{members}/{_NUMBERS[members]}")
    processes = Processes(store)
    logger.rank = store.rank
    name, is_first = _name(gpu, len(ranks)), store.rank == ranks[0]
    file = _file(name, warns=is_first)

    def share(step: str, mine: Brought, **more: Any) -> Settled:
        found: Settled = agree(
            store.under(step), ranks, mine, kind=Brought, decide=partial(settle, **more), result=Settled,
            timeout_s=timeout_s, gone=processes.is_gone,
        )  # fmt: skip
        return found

    own = None
    if not anew:
        own = job.peek(name, Cell) or _kept(file, gpu, len(ranks), warns=is_first) or shipped().cell(gpu, len(ranks))
    found, measured_s = share("has", Brought(gpu=gpu, cell=own, obstacle=obstacle)), None
    if found.cell is None and not found.problem:
        began_s = time.monotonic()
        mine = _measured(gpu, measure)
        measured_s = time.monotonic() - began_s
        found = share("measured", mine, has_measured=True)
    others = shipped().without(gpu, len(ranks))
    if found.cell is None:
        if store.rank == found.speaks:
            logger.warning(
                "{} is not measured, and NCCL makes all its sums: {}; `tpcompile tune --nproc {}` measures it once, in "
                "less than a minute", place, found.problem, len(ranks),
            )  # fmt: skip
        return Tuned(table=others, cell=None)
    # Groups that measure at the same time end with the same cell: ranks of a job are compared by their graphs.
    cell = job.put_first(name, found.cell.model_dump(mode="json"), Cell) or found.cell
    if measured_s is not None and is_first:
        _keep(file, cell)
        logger.info("measured on {} in {:.1f} s, kept in {}", place, measured_s, file)
    return Tuned(table=others.with_cell(cell), cell=cell, measured_s=measured_s, file=file)


def obstacle_here(device: torch.device) -> str:
    """Why this process does not measure at the setup of a program; empty where it does."""
    if os.environ.get(TUNE, "1") == "0":
        return f"{TUNE}=0"
    free, _ = torch.cuda.mem_get_info(device)
    return f"{free >> 20} MiB of the GPU are free" if free < _LEAST_FREE_BYTES else ""


def _measured(gpu: str, measure: Measure) -> Brought:
    try:
        return Brought(gpu=gpu, cell=measure())
    except RuntimeError as error:  # of CUDA, NCCL and symmetric memory: NCCL alone may still run
        return Brought(gpu=gpu, obstacle=str(error).splitlines()[0])


def _name(gpu: str, num_ranks: int) -> str:
    """`NVIDIA_H200-2-1f0a...`: of one machine's GPU and releases."""
    releases = tuning.versions()
    text = " ".join(releases[name] for name in ("torch", "nccl", "driver"))
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', gpu)}-{num_ranks}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _file(name: str, *, warns: bool) -> Path | None:
    try:
        return cache_folder("by_size") / f"{name}.json"
    except TpCompileError as error:
        _log(f"what is measured is not kept: {error}", warns=warns)
        return None


def _kept(file: Path | None, gpu: str, num_ranks: int, *, warns: bool) -> Cell | None:
    """The cell in the cache; None for none, and for a damaged file."""
    if file is None or not file.exists():
        return None
    try:
        return Table.read(file).cell(gpu, num_ranks)
    except (TpCompileError, OSError) as error:
        _log(f"measuring anew: {error}", warns=warns)
        return None


def _keep(file: Path | None, cell: Cell) -> None:
    """Write the file whole: a job that starts meanwhile reads it, or finds none."""
    if file is None:
        return
    try:
        os.replace(temporary(file.parent, Table(cells=(cell,)).to_json(indent=1) + "\n"), file)
    except OSError as error:
        _log(f"what was measured is not kept: {error}", warns=True)


def _log(text: str, *, warns: bool) -> None:
    """Ranks of a machine share the file, and one of them warns."""
    (logger.warning if warns else logger.debug)("{}", text)
