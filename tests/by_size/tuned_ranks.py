"""What ranks do in test_tuned.py: they agree on a cell, with a clock that is fake and caches of their own."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpcompile
from tests.by_size.rows import ON_CPU
from tpcompile.by_size import Table, in_flight, setting, sums, tuned, tuning, workspace
from tpcompile.by_size.__main__ import tune
from tpcompile.by_size.table import Algorithm, Cell, Measured, fastest_rows
from tpcompile.evidence.records.reader import read_record

GPU = "NVIDIA Test 1"
NO_ACCESS = "no peer access"
H100 = "NVIDIA H100 80GB HBM3"
WAIT_S = 1.0
FASTEST: tuple[Algorithm, ...] = ("one_shot", "two_shot", "one_shot", "two_shot")
"""What the clock of each rank finds fastest, so that ranks that did not agree would have different rows."""


def cell(fastest: Algorithm, *, gpu: str = GPU, num_ranks: int = 2) -> Cell:
    us: dict[Algorithm, float] = {"nccl": 10.0, "one_shot": 12.0, "two_shot": 12.0, fastest: 5.0}
    times = (Measured(size_bytes=4096, us=us),)
    return Cell(gpu=gpu, num_ranks=num_ranks, rows=fastest_rows(times), measured=times, command="a test")


def place_in(folder: str, *, shared: bool = False) -> Path:
    """Make a cache for this rank, or for all, the one that is used; returns the file of its cell."""
    cache = Path(folder, "shared" if shared else f"rank{dist.get_rank()}")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    file = tuned.cache_file(tuned._name(GPU, 2))
    assert file.is_relative_to(cache)
    return file


def kept_in(file: Path) -> str:
    return Table(cells=(read_record(Cell, file),)).rows(GPU, 2)


def agreed(**options: Any) -> dict[str, Any]:
    """What this rank uses, how often it measured, and what it wrote to stderr."""
    calls: list[str] = []

    def measure() -> Cell:
        calls.append("measured")
        return cell(FASTEST[dist.get_rank()])

    given: dict[str, Any] = {"group": dist.group.WORLD, "gpu": GPU, "measure": measure, "timeout_s": 60.0}
    said = io.StringIO()
    with redirect_stderr(said):
        found = tuned.tuned(**given | options)
    rows = found.rows(options.get("gpu", GPU), 2)
    return {"rows": rows, "digest": found.digest, "measured": len(calls), "said": said.getvalue()}


def nobody_has_one(folder: str) -> dict[str, Any]:
    file = place_in(folder, shared=True)
    found = agreed()
    dist.barrier()
    return found | {"kept": kept_in(file), "files": len(list(file.parent.iterdir()))}


def kept(folder: str, ranks: list[int], **options: Any) -> dict[str, Any]:
    """These ranks have in their caches what their clocks find."""
    file = place_in(folder)
    if dist.get_rank() in ranks:
        file.write_text(cell(FASTEST[dist.get_rank()]).to_json())
    return agreed(**options)


def damaged(folder: str, text: str) -> dict[str, Any]:
    file = place_in(folder, shared=True)
    if dist.get_rank() == 0:
        file.write_text(text)
    dist.barrier()
    found = agreed()
    dist.barrier()
    return found | {"kept": kept_in(file)}


def comes_late(folder: str) -> dict[str, Any]:
    """Rank 1 comes when rank 0 has given up, with a cell."""
    file = place_in(folder)
    if dist.get_rank() == 1:
        file.write_text(cell("two_shot").to_json())
        dist.barrier()
    found = agreed(timeout_s=WAIT_S)
    if dist.get_rank() == 0:
        dist.barrier()
    return found


def _dead_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def dies_in_its_measurement(folder: str) -> dict[str, Any]:
    """Rank 1 gives the pid of a process that has ended, and does not come back from its measurement."""

    def measure() -> Cell:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return cell("one_shot")

    place_in(folder)
    pid = _dead_pid()
    if dist.get_rank() == 1:
        os.getpid = lambda: pid
    try:
        found = agreed(measure=measure, timeout_s=3600.0)
    except KeyboardInterrupt:
        found = {}
    dist.barrier()
    return found


def cannot_measure(folder: str) -> dict[str, Any]:
    def measure() -> Cell:
        if dist.get_rank() == 1:
            raise RuntimeError(f"{NO_ACCESS}\nand more")
        return cell("one_shot")

    place_in(folder)
    return agreed(measure=measure)


def may_not_measure(folder: str) -> dict[str, Any]:
    place_in(folder)
    return agreed(obstacle="TPCOMPILE_TUNE=0" if dist.get_rank() == 1 else "")


def shipped_cell(folder: str, left_out: str) -> dict[str, Any]:
    place_in(folder)
    os.environ["TPCOMPILE_NO_SHIPPED_TABLES"] = left_out
    return agreed(gpu=H100, measure=lambda: cell("two_shot", gpu=H100))


def two_groups(folder: str) -> dict[str, Any]:
    """Ranks 0 and 2 find other times than 1 and 3."""
    place_in(folder)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return agreed(group=pairs[dist.get_rank() % 2])


def _stand_in_for_gpus(measure: Callable[..., Cell]) -> None:
    """This rank takes itself for one with a GPU and NCCL."""
    setting._device = lambda: torch.device("cuda", 0)
    setting.gpu_of = lambda device: GPU
    setting._NCCL_BACKEND = "gloo"
    tuned.obstacle_here = lambda device: ""
    setting.tuning.measure = measure


def through_sums(folder: str) -> dict[str, Any]:
    """Two settings and a program of one group, whose text the ranks compare."""
    calls: list[float] = []

    def measure(group: dist.ProcessGroup, device: torch.device, gpu: str, command: str) -> Cell:
        calls.append(0.0)
        return cell(FASTEST[dist.get_rank()])

    place_in(folder)
    _stand_in_for_gpus(measure)
    with redirect_stderr(io.StringIO()):
        found = [sums("by_size"), sums("by_size", dist.group.WORLD)]
        call = tpcompile.run(lambda x: x, "default", is_compiled=True, all_reduce="by_size", name="same")
    call(torch.ones(2))
    texts = {one.text(None) for one in found if one is not None} | {call._steps._vote.all_reduce}
    return {"texts": texts, "measured": len(calls)}


def one_sums_by_nccl(folder: str) -> dict[str, Any]:
    """Rank 1 has `nccl` at first, and all ranks the same at last."""
    place_in(folder)
    _stand_in_for_gpus(lambda *_: cell("one_shot"))
    said = io.StringIO()
    began_s = time.monotonic()
    with redirect_stderr(said):
        first = sums("nccl" if dist.get_rank() == 1 else "by_size", timeout_s=3600.0)
    waited_s = time.monotonic() - began_s
    pair = dist.new_group([0, 1])
    found = [sums(setting, pair) for setting in ("nccl", "nccl", "by_size")]
    return {
        "first": first and first.text(None),
        "said": said.getvalue(),
        "waited_s": waited_s,
        "then": found[-1].text(pair),
    }


def not_measurable(folder: str) -> dict[str, Any]:
    """Three ranks, for which torch's kernels are not used."""
    place_in(folder)
    _stand_in_for_gpus(lambda *_: cell("one_shot"))
    said = io.StringIO()
    with redirect_stderr(said):
        found = [sums("by_size"), sums("by_size")]
    return {"text": found[0].text(None) if found[0] else "", "said": said.getvalue()}


class Clock:
    """In place of a CUDA graph: makes two calls, and says the next of these times, later on rank 1."""

    us_of: tuple[float, ...] = ()
    number = 0

    def __init__(self, step: Callable[[int], object]) -> None:
        self._us = Clock.us_of[Clock.number % len(Clock.us_of)] + 0.5 * dist.get_rank()
        Clock.number += 1
        for number in range(2):
            step(number)

    def us(self, replays: int) -> float:
        return self._us


def measured_by_a_clock() -> dict[str, Any]:
    """The cell of two ranks, by a clock on which one-shot and pushing are the fastest; what it leaves behind."""
    tuning.Timed, tuning.SIZES, tuning.SIZES_IN_FLIGHT = Clock, [64, 4096], [1 << 20, 2 << 20]
    tuning.Bench.make_memory = lambda self, num_bytes: None
    Clock.us_of = (3.0, 13.0, 8.0, 11.0)  # nothing, NCCL, one-shot, two-shot
    state = torch.random.get_rng_state()
    group, device = dist.group.WORLD, torch.device("cpu")
    found = tuning.measure(group, device, GPU, "a test")
    Clock.us_of, Clock.number = (13.0, 14.0, 12.0, 20.0, 21.0, 19.0), 0
    products = tuning.pushed(tuning.Bench(group, device), rows="")
    left = [*workspace.OF_GROUPS, *in_flight.OF_GROUPS]
    is_same = torch.equal(state, torch.random.get_rng_state())
    return {"cell": found, "products": products, "left": left, "has the same random numbers": is_same}


def products_of_both() -> list[bool]:
    """Whether each form of a product and its sum is that of NCCL, which on a CPU is gloo."""
    group, device = dist.group.WORLD, torch.device("cpu")
    steps = tuning.products(
        group.group_name, device, 1 << 20, tuning.Bench(group, device).by_rows(f"{1 << 20}:one_shot")
    )
    first: torch.Tensor = steps["nccl"](0)
    found = [torch.equal(step(number), first) for step in steps.values() for number in (0, 1)]
    return [*found, bool(first.count_nonzero())]


def tunes(folder: str) -> dict[str, Any]:
    """What `tpcompile tune` prints: at first, when it is kept, anew with a file, and where no rank can measure."""
    table = Path(folder, "table.json")
    place_in(folder)
    calls: list[str] = []

    def measure() -> Cell:
        calls.append("measured")
        return cell("one_shot")

    def fail() -> Cell:
        raise RuntimeError(NO_ACCESS)

    if dist.get_rank() == 0:
        Table(cells=(cell("one_shot", gpu="other"),)).write(table)
    asked: dict[str, Any] = {"json": None, "write": None, "anew": False}
    codes, texts = [], []
    anew = asked | {"anew": True}
    with_files = anew | {"json": "-", "write": str(table)}
    for make, settings in ((measure, asked), (measure, asked), (measure, with_files), (fail, anew)):
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            codes.append(int(tune(dist.group.WORLD, GPU, make, settings)))
        texts.append(printed.getvalue())
    dist.barrier()
    return {"codes": codes, "texts": texts, "measured": len(calls)}


def other_types() -> list[str]:
    """What is written where graphs sum half precision twice, integers, and what the rows are for."""
    found = []
    for dtype in (torch.float16, torch.float16, torch.int64, torch.bfloat16):
        said = io.StringIO()
        with redirect_stderr(said):
            setting.Sums(ON_CPU).rows_for(torch.empty(8, 16, dtype=dtype), dist.group.WORLD.group_name)
        found.append(said.getvalue())
    return found
