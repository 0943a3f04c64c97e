"""What `all_reduce="by_size"` costs at the setup of a job, and what the ranks then use.

torchrun ... scripts/tune/setup.py FILE [--dry]

--dry: two ranks on CPU, with times that nobody measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.by_size import Sums, sums
from tpcompile.by_size.table import Cell, Row
from tpcompile.by_size.tuned import tuned
from tpcompile.by_size.tuning import SIZES, Bench
from tpcompile.ranks.env import choose_device, process_group, rank_env


def dry_sums(group: dist.ProcessGroup) -> Sums:
    """As `sums`, on a CPU."""

    def measure() -> Cell:
        time.sleep(1)
        rows = (Row(up_to_bytes=4096, algorithm="one_shot"),)
        return Cell(gpu="cpu", num_ranks=group.size(), rows=rows, push_from_bytes=1 << 20)

    return Sums(tuned(group, "cpu", measure, timeout_s=30))


def wrong_sizes(group: dist.ProcessGroup, device: torch.device, found: Sums) -> list[int]:
    """Sizes at which what the rows choose is not, bit for bit, what NCCL sums on two ranks."""
    bench, wrong = Bench(group, device), []
    for size in SIZES[: 8 if device.type == "cpu" else None]:
        x = torch.randn(size // 2, device=device).to(torch.bfloat16)
        rows = found.rows_for(x, bench.name)
        expected = bench.nccl(x.clone())
        if not torch.equal(bench.by_rows(rows)(x.clone()), expected):
            wrong.append(size)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    env = rank_env()
    device = choose_device("cpu" if given.dry else "cuda", env)
    with process_group(env, device, timeout_s=60) as group:
        dist.all_reduce(torch.ones(1, device=device))  # the communicator is not part of the measurement
        free_before = 0 if given.dry else torch.cuda.mem_get_info(device)[0]
        began_s = time.monotonic()
        found: Any = dry_sums(group) if given.dry else sums("by_size", group)
        seconds = time.monotonic() - began_s
        torch.manual_seed(dist.get_rank())
        mine: dict[str, Any] = {"seconds": round(seconds, 2), "text": found.text(group)}
        if not given.dry:
            torch.cuda.empty_cache()
            mine["mib_kept"] = (free_before - torch.cuda.mem_get_info(device)[0]) >> 20
        mine["wrong_sizes"] = wrong_sizes(group, device, found)
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, mine, group=group)
        if group.rank() == 0:
            given.file.write_text(json.dumps({"ranks": every, "is_ok": is_ok(every)}, indent=1) + "\n")


def is_ok(ranks: list[dict[str, Any]]) -> bool:
    are_alike = len({one["text"] for one in ranks}) == 1
    return are_alike and not any(one.get("wrong_sizes") for one in ranks)


if __name__ == "__main__":
    main()
