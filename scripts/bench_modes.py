"""Time per call of eager, A, B and C on the same weights and input, in interleaved rounds of one run.

    torchrun --standalone --nproc-per-node 8 scripts/bench_modes.py --preset wan14b --json FILE [--train]

Rounds rotate the order of the modes; the table gives the median over rounds of the mean ms per call, and ratios to C
taken round by round. Single numbers move between runs, ratios within one run less.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile import config
from tpcompile.dist.strategies import Collectives, DisabledCollectives, InPlaceCollectives
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.testing.draw import draw_inputs, draw_stack_weights

COMMS: dict[str, Any] = {
    "eager": Collectives,
    "A": DisabledCollectives,
    "B": InPlaceCollectives,
    "C": Collectives,
}


def programs(settings: config.RunConfig, device: torch.device, *, train: bool) -> dict[str, Callable[[], None]]:
    """Mode -> one call of its program, warmed up."""
    block, dtype = settings.block, getattr(torch, settings.block.dtype)
    full = draw_stack_weights(block, seed=0, dtype=dtype, device=device)
    inputs = draw_inputs(block, seed=1, device=device, dtype=dtype, seq_len=block.seq_len)
    cotangent = torch.randn_like(inputs[0])
    calls = {}
    for name, comm in COMMS.items():
        with torch.device("meta"):
            stack = TransformerStack(block, comm(dist.group.WORLD))
        stack = stack.to_empty(device=device)
        load_full_state_dict(stack, full)
        calls[name] = one_call(
            stack if name == "eager" else torch.compile(stack), stack, inputs, cotangent, train=train
        )
        for _ in range(5):
            calls[name]()
    return calls


def one_call(program: Any, stack: Any, inputs: Any, cotangent: torch.Tensor, *, train: bool) -> Callable[[], None]:
    """A closure that runs the program once, with a backward pass when training."""
    x, *rest = inputs

    def call() -> None:
        with torch.set_grad_enabled(train):
            y = program(x.detach().requires_grad_(train), *rest)
            if train:
                y.backward(cotangent)
                stack.zero_grad(set_to_none=True)

    return call


def timed(call: Callable[[], None], calls: int, device: torch.device) -> float:
    """Mean ms over back-to-back calls, all ranks together."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def main() -> None:
    """Warm up, measure, print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu_smoke")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    overrides = [f"block.num_layers={args.layers}"] if args.layers else []
    settings = config.load(args.preset, overrides)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    calls = programs(settings, device, train=args.train)
    names = list(calls)
    ms: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            ms[name].append(timed(calls[name], args.calls, device))
    if dist.get_rank() == 0:
        report(args, settings, ms)
    dist.destroy_process_group()


def report(args: argparse.Namespace, settings: config.RunConfig, ms: dict[str, list[float]]) -> None:
    """Print and keep the result."""
    ratios = {name: [t / c for t, c in zip(times, ms["C"], strict=True)] for name, times in ms.items()}
    result = {
        "command": " ".join(sys.argv),
        "preset": settings.preset,
        "train": args.train,
        "layers": settings.block.num_layers,
        "world_size": dist.get_world_size(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": args.rounds,
        "calls_per_round": args.calls,
        "median_ms": {name: round(statistics.median(times), 3) for name, times in ms.items()},
        "ratio_to_C": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "ratio_range": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
    }
    print(json.dumps({key: result[key] for key in ("preset", "train", "median_ms", "ratio_to_C")}))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
