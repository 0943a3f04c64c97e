"""Host time of the eager wrappers against in-place torch.distributed calls, on torch's fake process group.

    python scripts/bench_wrappers.py [--rounds 300] [--calls 200] [--out FILE]

The fake group communicates nothing (its all-gather, and on torch 2.13 its reduce-scatter, copy within the rank), so
what remains is host time. Per wrapper, interleaved in rotating order; a ratio is the median over rounds of the ratio
within a round:

    reduce   dist.all_reduce in place, of as many bytes as the wrapper's input
    twin     the in-place call of the wrapper's kind, into a buffer made beforehand
    fresh    the twin with its buffer made at each call, as a function that returns a new tensor must
    buffer   making that buffer alone

With a gradient, forward alone and forward with backward, against an autograd.Function with in-place c10d calls, as
Megatron writes it:

    function the same, out of place as the wrapper is
    in_place the same on its input itself, which a wrapper must leave alone
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
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpcompile.collectives import api as tp
from tpcompile.collectives import asynchronous as later

WORLD = 4
# torch 2.13 renamed the two and warns at every call of the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Calls = dict[str, Callable[[], Any]]


def pairs() -> dict[str, Calls]:
    """Wrapper -> its call and the calls that it is compared with, except `reduce`."""
    g, x = dist.group.WORLD, torch.randn(8, 16)
    wide, part, same = x.new_empty(WORLD * 8, 16), x.new_empty(8 // WORLD, 16), torch.empty_like(x)
    return {
        "all_reduce": {
            "wrapper": lambda: tp.all_reduce(x, group=g),
            "twin": lambda: dist.all_reduce(same, group=g),
            "fresh": lambda: dist.all_reduce(x.clone(), group=g),
            "buffer": lambda: x.clone(),
        },
        "all_gather_single": {
            "wrapper": lambda: tp.all_gather_single(x, dim=0, group=g),
            "twin": lambda: all_gather(wide, x, group=g),
            "fresh": lambda: all_gather(x.new_empty(WORLD * 8, 16), x, group=g),
            "buffer": lambda: x.new_empty(WORLD * 8, 16),
        },
        "reduce_scatter_single": {
            "wrapper": lambda: tp.reduce_scatter_single(x, dim=0, group=g),
            "twin": lambda: reduce_scatter(part, x, group=g),
            "fresh": lambda: reduce_scatter(x.new_empty(8 // WORLD, 16), x, group=g),
            "buffer": lambda: x.new_empty(8 // WORLD, 16),
        },
        "all_to_all_single": {
            "wrapper": lambda: tp.all_to_all_single(x, group=g),
            "twin": lambda: dist.all_to_all_single(same, x, group=g),
            "fresh": lambda: dist.all_to_all_single(torch.empty_like(x), x, group=g),
            "buffer": lambda: torch.empty_like(x),
        },
        "broadcast": {
            "wrapper": lambda: tp.broadcast(x, src=0, group=g),
            "twin": lambda: dist.broadcast(same, src=0, group=g),
            "fresh": lambda: dist.broadcast(x.clone(), src=0, group=g),
            "buffer": lambda: x.clone(),
        },
        "all_reduce_start": {
            "wrapper": lambda: later.all_reduce_start(x, group=g).wait(),
            "twin": lambda: dist.all_reduce(same, group=g, async_op=True).wait(),
            "fresh": lambda: dist.all_reduce(x.clone(), group=g, async_op=True).wait(),
            "buffer": lambda: x.clone(),
        },
    }


class Reduce(torch.autograd.Function):
    """All-reduce in place, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, clones: bool) -> Tensor:
        """Same shape."""
        y = x.clone() if clones else x
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Same shape."""
        return grad, None, None


class Copy(torch.autograd.Function):
    """Identity, all-reduce of the gradient, in place unless `clones`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, clones: bool) -> Tensor:
        """Same tensor."""
        ctx.group, ctx.clones = group, clones
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Same shape."""
        total = grad.clone() if ctx.clones else grad
        dist.all_reduce(total, group=ctx.group)
        return total, None, None


def pairs_with_grad() -> dict[str, Calls]:
    """Wrapper -> its call with a gradient and Megatron-style functions."""
    g, x, grad = dist.group.WORLD, torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    calls: dict[str, Calls] = {
        "all_reduce": {
            "wrapper": lambda: tp.all_reduce(x, group=g),
            "function": lambda: Reduce.apply(x, g, True),
            "in_place": lambda: Reduce.apply(x, g, False),
        },
        "copy_to_tp": {
            "wrapper": lambda: tp.copy_to_tp(x, group=g),
            "function": lambda: Copy.apply(x, g, True),
            "in_place": lambda: Copy.apply(x, g, False),
        },
    }

    def with_backward(forward: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(forward(), x, grad)

    both = {
        f"{name}, with backward": {kind: with_backward(fn) for kind, fn in of_name.items()}
        for name, of_name in calls.items()
    }
    return {**calls, **both}


def measure(calls: Calls, rounds: int, number: int) -> dict[str, float]:
    """Medians in microseconds, and of the wrapper's ratios; `buffer_of_twin`: share of the twin's time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for fn in calls.values():
        timeit.timeit(fn, number=number)
    for turn in range(rounds):
        names = list(calls)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timeit.timeit(calls[name], number=number) / number * 1e6)
    found = {f"{name}_us": round(statistics.median(values), 2) for name, values in times.items()}
    for over in times.keys() - {"wrapper", "buffer"}:
        found[f"ratio_to_{over}"] = _median_ratio(times["wrapper"], times[over])
    if "buffer" in times:
        found["buffer_of_twin"] = _median_ratio(times["buffer"], times["twin"])
    return found


def _median_ratio(times: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times, others, strict=True)), 3)


def main() -> None:
    """Measure under no_grad and with a gradient, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    with torch.no_grad():
        same = torch.randn(8, 16)
        reduce = {"reduce": lambda: dist.all_reduce(same, group=dist.group.WORLD)}
        wrappers = {name: measure({**calls, **reduce}, args.rounds, args.calls) for name, calls in pairs().items()}
    with_grad = {name: measure(calls, args.rounds, args.calls) for name, calls in pairs_with_grad().items()}
    dist.destroy_process_group()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tensor": "8 x 16 float32, fake process group of 4, 1 thread",
        "rounds": args.rounds,
        "calls_per_round": args.calls,
        "wrappers": wrappers,
        "wrappers_with_grad": with_grad,
    }
    text = json.dumps(result, indent=1, sort_keys=True)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
