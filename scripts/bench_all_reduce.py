"""Times of an all-reduce by size and algorithm, in CUDA graphs, and the rows of tpcompile/by_size/table.json.

    torchrun --standalone --nproc-per-node 2 scripts/bench_all_reduce.py --json FILE [--write TABLE]

TABLE is tpcompile/by_size/table.json, or a table of your own.

Every call follows a kernel that writes its input, as in a block, and the time of that kernel alone is taken off. `nccl`
is the in-place all-reduce that Inductor issues; `one_shot` and `two_shot` are the op of tpcompile.by_size, with the
copies that it makes; `raw` are torch's ops on memory that holds the input already. Rounds alternate between the forms;
a time is the median over rounds of the slowest rank's.

Then the rows are chosen, and `by_size` is timed beside `nccl` once more, at these sizes and between them: the exit
status is 1 where it is slower by more than 3 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.by_size.op import OP, chosen
from tpcompile.by_size.table import MIN_RATIO, NCCL, Cell, Measured, Row, Table
from tpcompile.by_size.workspace import workspace_of
from tpcompile.torch_api import c10d

SIZES = [64, 512] + [4096 << step for step in range(14)] + [48 << 20]
"""Bytes: statistics of 8 and 64 tokens, 4 KiB to 32 MiB, and the 4680 tokens of wan14b."""
BETWEEN = [3 << step for step in range(12, 24, 2)]
CALLS = 20
ROUNDS = 9
ROUND_US = 3000.0
"""About how long one form runs in one round."""
DTYPE = torch.bfloat16
ALGORITHMS = ("one_shot", "two_shot")
Sum = Callable[[Tensor], object]


class Timed:
    """A CUDA graph of calls, each behind the kernel that writes its input."""

    def __init__(self, num_bytes: int, device: torch.device, call: Sum) -> None:
        self.source = torch.zeros(num_bytes // DTYPE.itemsize, dtype=DTYPE, device=device)
        self.x, self.call = torch.empty_like(self.source), call
        self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                self.step()

    def step(self) -> None:
        torch.mul(self.source, 1.0, out=self.x)
        self.call(self.x)

    def us(self, replays: int) -> float:
        """Of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / replays / CALLS


class Bench:
    """On this rank."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.group = device, dist.group.WORLD
        self.name = self.group.group_name

    def nccl(self, x: Tensor) -> object:
        """As Inductor issues it."""
        return c10d.ops.wait_tensor(c10d.ops.all_reduce_(x, "sum", self.name))

    def by_rows(self, rows: str) -> Sum:
        """As the pass leaves it or replaces it."""

        def call(x: Tensor) -> object:
            is_nccl = chosen(x, rows, self.group.size()) == "nccl"
            return self.nccl(x) if is_nccl else OP(x, rows, self.name)

        return call

    def raw(self, algorithm: str, num_bytes: int) -> Sum:
        """The sum alone, of a buffer of its own: what a copy into it adds is in the other forms. Never by multicast."""
        import torch.distributed._symmetric_memory as symm

        buffer = symm.empty(num_bytes // DTYPE.itemsize, dtype=DTYPE, device=self.device)
        buffer.zero_()
        symm.rendezvous(buffer, self.group)
        if algorithm == "one_shot":
            return lambda x: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self.name)
        return lambda x: torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self.name)

    def times(self, num_bytes: int, forms: dict[str, Sum]) -> dict[str, float]:
        """us of each form, without the kernel before it; the slowest rank of each round."""
        graphs = {
            name: Timed(num_bytes, self.device, call) for name, call in {"nothing": lambda x: None, **forms}.items()
        }
        replays = max(2, int(ROUND_US / CALLS / (5 + num_bytes / 2e5)))
        rounds: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            dist.barrier()
            found = torch.tensor([graph.us(replays) for graph in graphs.values()], device=self.device)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            for name, us in zip(graphs, found.tolist(), strict=True):
                rounds[name].append(us)
        graphs.clear()
        gc.collect()
        medians = {name: statistics.median(us) for name, us in rounds.items()}
        before = medians.pop("nothing")
        return {name: round(us - before, 3) for name, us in medians.items()}


def measured(bench: Bench, sizes: list[int]) -> list[dict[str, Any]]:
    """Every algorithm at every size."""
    workspace_of(bench.name, bench.device).view_like(torch.empty(sizes[-1], dtype=torch.uint8, device=bench.device))
    found = []
    for size in sizes:
        forms: dict[str, Sum] = {"nccl": bench.nccl}
        for algorithm in ALGORITHMS:
            forms[algorithm] = bench.by_rows(f"{size}:{algorithm}")
            forms[f"{algorithm} raw"] = bench.raw(algorithm, size)
        found.append({"size_bytes": size, "us": bench.times(size, forms)})
        said(f"{size:>10} {found[-1]['us']}")
    return found


def again(bench: Bench, rows: str, sizes: list[int]) -> list[dict[str, Any]]:
    """What the table chooses beside NCCL, and whether it is slower."""
    found = []
    for size in sizes:
        us = bench.times(size, {"nccl": bench.nccl, "by_size": bench.by_rows(rows)})
        is_slower = us["by_size"] > MIN_RATIO * us["nccl"]
        found.append({"size_bytes": size, "us": us, "is_slower": is_slower})
        said(f"{size:>10} {us}{' SLOWER' if is_slower else ''}")
    return found


def cell_of(bench: Bench, found: list[dict[str, Any]]) -> Cell:
    """The cell of the table, the same on all ranks: times are of the slowest."""
    algorithms = ("nccl", *ALGORITHMS)
    times = [Measured(size_bytes=one["size_bytes"], us={name: one["us"][name] for name in algorithms}) for one in found]
    return Cell(
        gpu=torch.cuda.get_device_name(bench.device),
        num_ranks=bench.group.size(),
        rows=fastest_rows(times),
        measured=tuple(times),
        command=f"{command_of(bench.group.size())} --write tpcompile/by_size/table.json",
        versions=versions(),
    )


def fastest_rows(measured: Iterable[Measured]) -> tuple[Row, ...]:
    """Rows that are not slower than NCCL at any measured size.

    A row holds from the size before it to its own: its algorithm is the fastest at its own size of those that beat NCCL
    there and are no slower than NCCL at the size before, or NCCL.
    """
    kept: list[Row] = []
    before = None
    for one in sorted(measured, key=lambda each: each.size_bytes):
        faster = [name for name, us in one.us.items() if us * MIN_RATIO <= one.us[NCCL]]
        if before is not None:
            faster = [name for name in faster if before.us[name] <= before.us[NCCL]]
        fastest = min(faster, key=one.us.__getitem__, default=NCCL)
        row = Row(up_to_bytes=one.size_bytes, algorithm=fastest)
        if kept and kept[-1].algorithm == row.algorithm:
            kept.pop()
        kept.append(row)
        before = one
    if kept and kept[-1].algorithm == NCCL:
        kept.pop()
    return tuple(kept)


def with_cell(table: Table, cell: Cell) -> Table:
    """The table with this cell in place of what it has for that GPU and number of ranks.

    What it has on messages in flight is kept, if the cell says nothing on them.
    """
    others = [one for one in table.cells if (one.gpu, one.num_ranks) != (cell.gpu, cell.num_ranks)]
    if cell.push_from_bytes is None:
        cell = cell.model_copy(update={"push_from_bytes": table.push_from(cell.gpu, cell.num_ranks)})
    cells = sorted([*others, cell], key=lambda one: (one.gpu, one.num_ranks))
    return Table(cells=tuple(cells))


def command_of(num_ranks: int) -> str:
    return f"torchrun --standalone --nproc-per-node {num_ranks} scripts/bench_all_reduce.py --json FILE"


def versions() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, "nccl": nccl, "python": platform.python_version()}


def said(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the times go")
    parser.add_argument("--write", type=Path, help="table whose cell for this GPU and number of ranks is replaced")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    bench = Bench(device)
    found = measured(bench, SIZES)
    cell = cell_of(bench, found)
    table = Table(cells=(cell,))
    rows = table.rows(cell.gpu, cell.num_ranks)
    said(f"rows: {rows or 'nccl'}")
    checked = again(bench, rows, sorted([*SIZES, *BETWEEN]))
    if dist.get_rank() == 0:
        report = {
            "command": command_of(cell.num_ranks), "gpu": cell.gpu, "num_ranks": cell.num_ranks,
            "versions": cell.versions, "rows": rows, "measured": found, "again": checked,
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        if given.write is not None:
            before = Table.read(given.write) if given.write.exists() else Table()
            with_cell(before, cell).write(given.write)
    gc.collect()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return int(any(one["is_slower"] for one in checked))


if __name__ == "__main__":
    sys.exit(main())
