"""Many cases, in parallel, with the sentinel and with other tools -> results in the order of the cases."""

from __future__ import annotations

import os
import queue
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from tests.faults.case import Case
from tests.faults.columns import report_of
from tests.faults.judge import Result
from tests.faults.run import run_case
from tpcompile.errors import DirectoryTakenError
from tpcompile.launch import count_gpus

Device = Literal["auto", "cpu"]


def sweep(
    cases: Sequence[Case],
    run_dir: Path | None,
    *,
    jobs: int = 1,
    tools: Sequence[str] = (),
    device: Device = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Run the cases, `jobs` at a time, each in a folder of its own below `run_dir` (None: nothing is kept).

    `tools` are keys of `columns.COLUMNS`. On GPUs every case that runs has its own, as far as there are enough.
    Raises DirectoryTakenError when `run_dir` holds a run of one of the cases.
    """
    taken = [run_dir / case.name for case in cases if run_dir is not None and (run_dir / case.name).exists()]
    if taken:
        raise DirectoryTakenError(taken[0])
    with tempfile.TemporaryDirectory(prefix="tpcompile-faults-") if run_dir is None else nullcontext(run_dir) as folder:
        directory = Path(folder).resolve()
        slots: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for slot in range(jobs):
            slots.put(gpus_of(slot, gpus=visible_gpus(device), size=max(case.world_size for case in cases)))

        def one(case: Case) -> Result:
            gpus = slots.get()
            try:
                given = gpus if case.on_gpus else ""
                result = run_case(case, directory, gpus=given)
                reports = {tool: report_of(case, directory, tool, gpus=given) for tool in tools}
            finally:
                slots.put(gpus)
            progress(f"{case.name}: {result.outcome.value}")
            return result.model_copy(update={"columns": reports})

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            return list(pool.map(one, cases))


def visible_gpus(device: Device) -> list[str] | None:
    """Indices of the GPUs of this machine; empty for a run on CPUs, None on a machine without GPUs."""
    if device == "cpu":
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return list(filter(None, chosen.split(",")))
    every = list(map(str, range(count_gpus())))
    return every or None


def gpus_of(slot: int, *, gpus: Sequence[str] | None, size: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of the cases of one slot: `size` GPUs of its own while they last, then shared ones."""
    if gpus is None:
        return None
    first = slot * size % max(size, len(gpus) - len(gpus) % size)
    return ",".join(gpus[first : first + size])
