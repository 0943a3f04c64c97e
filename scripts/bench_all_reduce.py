"""Times of an all-reduce by size and algorithm, in CUDA graphs, and the rows of tpcompile/by_size/table.json.

    torchrun --standalone --nproc-per-node 2 scripts/bench_all_reduce.py --json FILE [--write TABLE]

TABLE is tpcompile/by_size/table.json, or a table of your own.

Every call follows a kernel that writes its input, as in a block, and the time of that kernel alone is taken off. `nccl`
is the in-place all-reduce that Inductor issues; `one_shot` and `two_shot` are the op of tpcompile.by_size, with the
copies that it makes; `raw` are torch's ops on memory that holds the input already. Rounds alternate between the forms;
a time is the median over rounds of the slowest rank's. `tpcompile tune` measures the same without the raw forms.

Then the rows are chosen, and `by_size` is timed beside `nccl` once more, at these sizes and between them: the exit
status is 1 where it is slower by more than 3 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.by_size.table import MIN_RATIO, Measured, Table, shown
from tpcompile.by_size.tuning import ALGORITHMS, DTYPE, SIZES, Bench, Sum, cell_of, pushed

BETWEEN = [3 << step for step in range(12, 24, 2)]


def raw(bench: Bench, algorithm: str, num_bytes: int) -> Sum:
    """The sum alone, of a buffer of its own: what a copy into it adds is in the other forms. Never by multicast."""
    import torch.distributed._symmetric_memory as symm

    buffer = symm.empty(num_bytes // DTYPE.itemsize, dtype=DTYPE, device=bench.device)
    buffer.zero_()
    symm.rendezvous(buffer, bench.group)
    if algorithm == "one_shot":
        return lambda x: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", bench.name)
    return lambda x: torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", bench.name)


def measured(bench: Bench, sizes: list[int]) -> list[dict[str, Any]]:
    """Every algorithm at every size."""
    bench.make_memory(sizes[-1])
    found = []
    for size in sizes:
        raws = {f"{name} raw": raw(bench, name, size) for name in ALGORITHMS}
        found.append({"size_bytes": size, "us": bench.times(size, {**bench.forms(size), **raws})})
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


def times_of(found: list[dict[str, Any]]) -> list[Measured]:
    """What the rows are chosen by."""
    names = ("nccl", *ALGORITHMS)
    return [Measured(size_bytes=one["size_bytes"], us={name: one["us"][name] for name in names}) for one in found]


def command_of(num_ranks: int) -> str:
    return f"torchrun --standalone --nproc-per-node {num_ranks} scripts/bench_all_reduce.py --json FILE"


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
    bench = Bench(dist.group.WORLD, device)
    found, products = measured(bench, SIZES), pushed(bench)
    command = f"{command_of(bench.group.size())} --write tpcompile/by_size/table.json"
    cell = cell_of(torch.cuda.get_device_name(device), bench, times_of(found), products, command)
    table = Table(cells=(cell,))
    rows = table.rows(cell.gpu, cell.num_ranks)
    said(f"{shown(rows, cell.push_from_bytes)}\n{cell.in_flight}")
    checked = again(bench, rows, sorted([*SIZES, *BETWEEN]))
    if dist.get_rank() == 0:
        report = {
            "command": command_of(cell.num_ranks), "gpu": cell.gpu, "num_ranks": cell.num_ranks,
            "versions": cell.versions, "rows": rows, "measured": found, "again": checked,
            "in_flight": [one.model_dump() for one in products], "push_from_bytes": cell.push_from_bytes,
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        if given.write is not None:
            before = Table.read(given.write) if given.write.exists() else Table()
            before.with_cell(cell).write(given.write)
    gc.collect()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return int(any(one["is_slower"] for one in checked))


if __name__ == "__main__":
    sys.exit(main())
