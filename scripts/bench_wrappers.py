"""Host time of the eager wrappers over their in-place torch.distributed twins, on a pretended process group.

    python scripts/bench_wrappers.py [--rounds 40] [--calls 2000] [--out FILE]

The fake group communicates nothing, so what remains is host time. Rounds interleave wrapper and twin; the ratio is the
median over rounds of the ratio within a round. A twin writes into a buffer made beforehand; `fresh` is the twin with
the result buffer made at each call, as a function that returns a new tensor must.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpcompile.dist import asynchronous as later
from tpcompile.dist import collectives as tp

WORLD = 4
# torch 2.13 renamed the two and warns at every call of the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Calls = dict[str, Callable[[], Any]]


def pairs() -> dict[str, Calls]:
    """Wrapper -> its call, its twin, and the twin with a fresh buffer."""
    g, x = dist.group.WORLD, torch.randn(8, 16)
    wide, part, same = x.new_empty(WORLD * 8, 16), x.new_empty(8 // WORLD, 16), torch.empty_like(x)
    return {
        "all_reduce": {
            "wrapper": lambda: tp.all_reduce(x, group=g),
            "twin": lambda: dist.all_reduce(same, group=g),
            "fresh": lambda: dist.all_reduce(x.clone(), group=g),
        },
        "all_gather_single": {
            "wrapper": lambda: tp.all_gather_single(x, dim=0, group=g),
            "twin": lambda: all_gather(wide, x, group=g),
            "fresh": lambda: all_gather(x.new_empty(WORLD * 8, 16), x, group=g),
        },
        "reduce_scatter_single": {
            "wrapper": lambda: tp.reduce_scatter_single(x, dim=0, group=g),
            "twin": lambda: reduce_scatter(part, x, group=g),
            "fresh": lambda: reduce_scatter(x.new_empty(8 // WORLD, 16), x, group=g),
        },
        "all_to_all_single": {
            "wrapper": lambda: tp.all_to_all_single(x, group=g),
            "twin": lambda: dist.all_to_all_single(same, x, group=g),
            "fresh": lambda: dist.all_to_all_single(torch.empty_like(x), x, group=g),
        },
        "broadcast": {
            "wrapper": lambda: tp.broadcast(x, src=0, group=g),
            "twin": lambda: dist.broadcast(same, src=0, group=g),
            "fresh": lambda: dist.broadcast(x.clone(), src=0, group=g),
        },
        "all_reduce_start": {
            "wrapper": lambda: later.all_reduce_start(x, group=g).wait(),
            "twin": lambda: dist.all_reduce(same, group=g, async_op=True).wait(),
            "fresh": lambda: dist.all_reduce(x.clone(), group=g, async_op=True).wait(),
        },
    }


def measure(calls: Calls, rounds: int, number: int) -> dict[str, float]:
    """Medians in microseconds and the median ratios of the wrapper to both twins."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for fn in calls.values():
        timeit.timeit(fn, number=number)
    for turn in range(rounds):
        names = list(calls)
        for name in names[turn % 3 :] + names[: turn % 3]:
            times[name].append(timeit.timeit(calls[name], number=number) / number * 1e6)
    found = {f"{name}_us": round(statistics.median(values), 2) for name, values in times.items()}
    for twin in ("twin", "fresh"):
        ratios = [a / b for a, b in zip(times["wrapper"], times[twin], strict=True)]
        found[f"ratio_to_{twin}"] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    """Measure under no_grad, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    with torch.no_grad():
        wrappers = {name: measure(calls, args.rounds, args.calls) for name, calls in pairs().items()}
    dist.destroy_process_group()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tensor": "8 x 16 float32, fake process group of 4, no_grad, 1 thread",
        "rounds": args.rounds,
        "calls_per_round": args.calls,
        "wrappers": wrappers,
    }
    text = json.dumps(result, indent=1, sort_keys=True)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
