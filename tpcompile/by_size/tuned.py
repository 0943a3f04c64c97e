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
from tpcompile.evidence.records.reader import read_record
from tpcompile.evidence.rundir import temporary
from tpcompile.evidence.text.ranks import exact_ranks, named_ranks
from tpcompile.private_folder import cache_folder
from tpcompile.ranks.agree import agree, bring
from tpcompile.ranks.processes import Processes
from tpcompile.ranks.store import RankStore
from tpcompile.sink import Sink

logger = Sink("sums by size")
TUNE = "TPCOMPILE_TUNE"
"""Variable: with 0 nothing is measured at the setup of a program, and NCCL makes sums that have no cell."""
_LEAST_FREE_BYTES = 3 << 30
"""Memory of the GPU without which a rank does not measure: one that ran out of it would leave the others waiting."""
_IS_OF_NCCL = re.compile(r"NCCL_(?!DEBUG)")
"""Variables that may change how fast NCCL sums."""
_FIRST = "has"
"""The agreement before a measurement."""
_NUMBERS: Counter[str] = Counter()


class Brought(Frozen):
    """What a rank has, or why it cannot measure."""

    cell: Cell | None = None
    obstacle: str = ""


class Settled(Frozen):
    """What all ranks use: a cell; for a problem NCCL; or neither, and they measure."""

    cell: Cell | None = None
    problem: str = ""
    speaks: int = 0
    """The rank that warns of the problem."""


def settle(brought: Mapping[int, Brought], absent: Mapping[int, str], *, has_measured: bool = False) -> Settled:
    """What the ranks do: after a measurement all must have a cell, and before it one is enough."""
    cells = [one.cell for one in brought.values() if one.cell is not None]
    problems = dict.fromkeys(absent, "did not come in time")
    if has_measured or not cells:
        problems |= {rank: one.obstacle for rank, one in brought.items() if one.obstacle}
    if problems:
        alike = grouped(sorted(problems), problems.__getitem__)
        text = "; ".join(f"{named_ranks(ranks)}: {why}" for why, ranks in alike.items())
        return Settled(problem=text, speaks=min(brought))
    return Settled(cell=cells[0] if cells else None)


def tuned(
    group: dist.ProcessGroup,
    gpu: str,
    measure: Callable[[], Cell],
    *,
    timeout_s: float,
    obstacle: str = "",
    uses_kept: bool = True,
) -> Table:
    """The table that ships with what the ranks agreed on for their GPU and number, and nothing for a problem.

    Every rank of the group calls it. `measure` is collective; a rank with an `obstacle` does not measure. Without
    `uses_kept` what a rank has does not count. A rank waits for the others for `timeout_s`, before and after its
    measurement. Where one does not come, has ended or cannot measure, one of the others warns. Raises RuntimeError when
    the job's store cannot be reached.
    """
    job, store, ranks = _meeting(group)
    place = (gpu, len(ranks))
    processes = Processes(store)
    logger.rank = store.rank
    name, is_first = _name(*place), store.rank == ranks[0]

    def share(step: str, mine: Brought, **more: Any) -> Settled:
        found: Settled = agree(
            store.under(step), ranks, mine, kind=Brought, decide=partial(settle, **more), result=Settled,
            timeout_s=timeout_s, gone=processes.is_gone,
        )  # fmt: skip
        return found

    own = None
    if uses_kept:
        own = job.peek(name, Cell) or _kept(name, warns=is_first) or shipped().cell(*place)
    found = share(_FIRST, Brought(cell=own, obstacle=obstacle))
    began_s = time.monotonic()
    is_measured = not (found.cell or found.problem)
    if is_measured:
        found = share("measured", _measured(measure), has_measured=True)
    others = shipped().without(*place)
    if found.cell is None:
        if store.rank == found.speaks:
            text = "{} x {} is not measured, and NCCL makes all its sums: {}; `tpcompile tune` measures GPUs of a host"
            logger.warning(text, len(ranks), gpu, found.problem)
        return others
    # Groups that measure at the same time end with the same cell: ranks of a job are compared by their graphs.
    cell = job.put_first(name, found.cell.model_dump(mode="json"), Cell) or found.cell
    if is_measured and is_first:
        logger.info("{} x {} measured in {:.1f} s", len(ranks), gpu, time.monotonic() - began_s)
        _keep(name, cell)
    return others.with_cell(cell)


def decline(group: dist.ProcessGroup, why: str) -> None:
    """Let the ranks of the group that call `tuned` know that this one does not, so that none waits for it."""
    _, store, _ = _meeting(group)
    bring(store.under(_FIRST), Brought(obstacle=why))


def _meeting(group: dist.ProcessGroup) -> tuple[RankStore, RankStore, list[int]]:
    """The job's store, that of the next agreement of these ranks, and the ranks."""
    ranks = sorted(dist.get_process_group_ranks(group))
    members = exact_ranks(ranks)
    _NUMBERS[members] += 1
    job = RankStore.of_job("tpcompile/by_size")
    return job, job.under(f"{members}/{_NUMBERS[members]}"), ranks


def obstacle_here(device: torch.device) -> str:
    """Why this process does not measure at the setup of a program; empty where it does."""
    if os.environ.get(TUNE, "1") == "0":
        return f"{TUNE}=0"
    free, _ = torch.cuda.mem_get_info(device)
    return f"{free >> 20} MiB of the GPU are free" if free < _LEAST_FREE_BYTES else ""


def _measured(measure: Callable[[], Cell]) -> Brought:
    try:
        return Brought(cell=measure())
    except RuntimeError as error:  # of CUDA, NCCL and symmetric memory: NCCL alone may still run
        return Brought(obstacle=str(error).splitlines()[0])


def _name(gpu: str, num_ranks: int) -> str:
    """`NVIDIA_H200-2-1f0a...`: what is measured again with other releases and other settings of NCCL."""
    versions = tuning.versions()
    settings = [f"{name}={value}" for name, value in os.environ.items() if _IS_OF_NCCL.match(name)]
    releases = " ".join([*(versions[name] for name in ("torch", "nccl", "driver")), *sorted(settings)])
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', gpu)}-{num_ranks}-{hashlib.sha256(releases.encode()).hexdigest()[:12]}"


def cache_file(name: str) -> Path:
    """Where this machine keeps a cell. Raises PreflightError where no folder is private to the user."""
    return cache_folder("by_size") / f"{name}.json"


def _kept(name: str, *, warns: bool) -> Cell | None:
    """None for no file; for a damaged one too, of which one of the ranks that share it warns."""
    try:
        return read_record(Cell, cache_file(name))
    except FileNotFoundError:
        return None
    except TpCompileError as error:
        (logger.warning if warns else logger.debug)("{}; measured anew unless a different rank has it", error)
        return None


def _keep(name: str, cell: Cell) -> None:
    """Write the file whole: a job that starts meanwhile reads it, or finds none."""
    try:
        file = cache_file(name)
        os.replace(temporary(file.parent, cell.to_json(indent=1) + "\n"), file)
    except (OSError, TpCompileError) as error:
        logger.warning("what was measured is not kept: {}", error)
