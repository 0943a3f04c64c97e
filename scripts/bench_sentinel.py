"""What the sentinel costs in steady state: time per call with it over time without, interleaved rounds in one run.

    torchrun --standalone --nproc-per-node 2 scripts/bench_sentinel.py [--rounds 30] [--step-ms 1.0] [--out FILE]

Two ranks, one compiled region. `step` is a region of about `--step-ms` with an all-reduce. `empty` is the smallest
possible region, so that the difference is the cost of the sentinel's own code per call: the median over blocks of 100
calls, since other processes of the host interrupt some blocks. Where Python has `sys.monitoring`, the loop of the
benchmark is user code whose lines are recorded, five events a call: `empty_without_lines` is without. Store operations
during the measured calls are counted, and memory, threads and sockets before the first and after the last sentinel.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives import all_reduce
from tpcompile.sentinel import Sentinel

_SETTLE_S = 0.3
"""After this time the sentinel's threads are connected, and it is in steady state."""
_LAYERS = 16
"""Additional layers in the second measurement, from which the time of one layer follows."""


def num_sockets() -> int:
    """Open sockets of this process."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def calibrated(step_ms: float, device: torch.device) -> Callable[[], Any]:
    """A compiled step with one all-reduce that takes about `step_ms` on this machine."""
    group = dist.group.WORLD
    weight = torch.randn(512, 512, device=device)

    def step(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = torch.tanh(x @ weight)
        return all_reduce(x, group=group)

    def compiled() -> Callable[[], Any]:
        torch.compiler.reset()
        fresh: Callable[..., Any] = torch.compile(step, backend="aot_eager", dynamic=False)
        fresh(x)
        return lambda: fresh(x)

    x = torch.randn(64, 512, device=device)
    took_ms = {}
    for depth in (1, 1 + _LAYERS):
        call = compiled()
        took_ms[depth] = 1e3 * min(seconds_per_call(call, 50) for _ in range(5))
    per_layer_ms = max(1e-3, (took_ms[1 + _LAYERS] - took_ms[1]) / _LAYERS)
    agreed = torch.tensor(max(1.0, 1 + (step_ms - took_ms[1]) / per_layer_ms), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)  # every rank must trace the same number of layers
    depth = round(float(agreed))
    return compiled()


def seconds_per_call(call: Callable[[], Any], calls: int, *, blocks: int = 1) -> float:
    """Mean over the calls of a block, median over the blocks, so that a few interrupted blocks do not count."""
    call()
    took = [_block(call, calls // blocks) for _ in range(blocks)]
    return statistics.median(took)


def _block(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(
    call: Callable[[], Any], *, rounds: int, calls: int, blocks: int = 1, flow: bool | None = None
) -> dict[str, Any]:
    """Medians with and without, the ratio within a round, and the store operations of the measured calls."""
    on, off, operations = [], [], 0
    for number in range(rounds):
        for with_sentinel in (number % 2 == 0, number % 2 == 1):  # alternate the order
            if with_sentinel:
                with Sentinel(flow=flow) as sentinel:
                    call()
                    time.sleep(_SETTLE_S)
                    before = sentinel.log.num_operations
                    on.append(seconds_per_call(call, calls, blocks=blocks))
                    operations += sentinel.log.num_operations - before
                    dist.barrier()  # a rank that has finished publishes to the store, while other ranks still measure
            else:
                time.sleep(_SETTLE_S)
                off.append(seconds_per_call(call, calls, blocks=blocks))
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    return {
        "on_us": 1e6 * statistics.median(on),
        "off_us": 1e6 * statistics.median(off),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "extra_us": 1e6 * statistics.median(a - b for a, b in zip(on, off, strict=True)),
        "store_operations": operations,
        "rounds": rounds,
        "calls": calls,
        "blocks": blocks,
    }


def growth(call: Callable[[], Any], calls: int) -> dict[str, int]:
    """Peak memory (kB) that `calls` calls under one sentinel add, after as many to warm up."""
    with Sentinel() as sentinel:
        for _ in range(calls // 10):
            call()
        before, operations = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sentinel.log.num_operations
        for _ in range(calls):
            call()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "calls": calls,
            "peak_memory_growth_kb": after - before,
            "store_operations": sentinel.log.num_operations - operations,
        }


def main() -> None:
    """Measure and print; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=200, help="calls of the step per round")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)
    with torch.no_grad():
        tiny = torch.zeros(1, device=device)
        empty = torch.compile(lambda x: x + 1, backend="aot_eager")
        empty(tiny)
        step = calibrated(options.step_ms, device)
        threads, sockets = threading.active_count(), num_sockets()
        found: dict[str, Any] = {
            "step": measure(step, rounds=options.rounds, calls=options.calls),
            "empty": measure(lambda: empty(tiny), rounds=options.rounds, calls=20 * options.calls, blocks=40),
            "empty_without_lines": measure(
                lambda: empty(tiny), rounds=options.rounds, calls=20 * options.calls, blocks=40, flow=False
            ),
            "growth": growth(step, 10_000),
        }
        found["left_over"] = {"threads": threading.active_count() - threads, "sockets": num_sockets() - sockets}
    found["share_of_1_ms"] = found["empty"]["extra_us"] / 1000.0
    if dist.get_rank() == 0:
        device_name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} cores"
        found["made_with"] = {
            "command": f"torchrun --nproc-per-node {dist.get_world_size()} {' '.join(sys.argv)}",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {device_name}",
        }
        print(json.dumps(found, indent=1))
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
