"""Time per call of eager and modes A, B and C on the same weights and input, in interleaved rounds of one run.

    torchrun --standalone --nproc-per-node 8 scripts/bench_modes.py --preset wan14b --json FILE [--train]

Each program runs in processes of its own, one per rank: a graph break in mode A makes Dynamo skip the stack's code
object for the life of a process, and B and C would then run block by block (repro/skipped_code_object.py). The compiled
regions that a call enters are counted beside the time; exit status 1 when B or C enter more than one.

Rounds rotate the order of the modes; the table gives the median over rounds of the mean ms per call, and ratios to C
taken round by round. Single numbers move between runs, ratios within one run less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile import config
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.recording import CaptureSession

COMMS: dict[str, Any] = {
    "eager": Collectives,
    "A": DisabledCollectives,
    "B": InPlaceCollectives,
    "C": Collectives,
}
ONE_GRAPH = ("B", "C")


class Program:
    """One mode in a process of its own, with its own process group; this rank's part of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = [sys.executable, *sys.argv, "--serve", name]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.regions_per_call: float = self._answer()

    def time_ms(self) -> float:
        """Mean ms per call over one round, all ranks together."""
        assert self._child.stdin is not None
        print("round", file=self._child.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)

    def _answer(self) -> float:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with status {self._child.wait()}")
        return float(json.loads(line))


def serve(name: str, args: argparse.Namespace, settings: config.RunConfig) -> None:
    """The process of one mode: regions per call first, then a time for every line on stdin."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore(f"bench_modes/{name}", server),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if cuda else None,
    )
    call = program(name, settings, device, train=args.train)
    for _ in range(5):
        call()
    print(json.dumps(regions_per_call(call)), flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(call, args.calls, device)), flush=True)
    dist.destroy_process_group()


def program(name: str, settings: config.RunConfig, device: torch.device, *, train: bool) -> Callable[[], None]:
    """One call of that mode's program."""
    block, dtype = settings.block, getattr(torch, settings.block.dtype)
    full = draw_stack_weights(block, seed=0, dtype=dtype, device=device)
    inputs = draw_inputs(block, seed=1, device=device, dtype=dtype, seq_len=block.seq_len)
    with torch.device("meta"):
        stack = TransformerStack(block, COMMS[name](dist.group.WORLD), num_layers=block.num_layers)
    stack = stack.to_empty(device=device)
    load_full_state_dict(stack, full)
    del full
    compiled = stack if name == "eager" else torch.compile(stack)
    return one_call(compiled, stack, inputs, torch.randn_like(inputs[0]), train=train)


def regions_per_call(call: Callable[[], None]) -> float:
    """Compiled regions that one warm call enters."""
    with CaptureSession() as session, session.phase("count"):
        call()
    return sum(count.entered for count in session.region_counts())


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


def main() -> int:
    """Start the programs, measure in rounds, print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu_smoke")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=list(COMMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    overrides = [f"block.num_layers={args.layers}"] if args.layers else []
    settings = config.load(args.preset, overrides)
    if args.serve:
        serve(args.serve, args, settings)
        return 0
    programs = [Program(name) for name in COMMS]
    ms: dict[str, list[float]] = {found.name: [] for found in programs}
    for number in range(args.rounds):
        start = number % len(programs)
        for found in programs[start:] + programs[:start]:
            ms[found.name].append(found.time_ms())
    for found in programs:
        found.close()
    regions = {found.name: found.regions_per_call for found in programs}
    if os.environ["RANK"] == "0":
        report(args, settings, ms, regions)
    return int(any(regions[name] != 1 for name in ONE_GRAPH))


def report(
    args: argparse.Namespace, settings: config.RunConfig, ms: dict[str, list[float]], regions: dict[str, float]
) -> None:
    """Print and keep the result."""
    ratios = {name: [t / c for t, c in zip(times, ms["C"], strict=True)] for name, times in ms.items()}
    result = {
        "command": " ".join(sys.argv),
        "preset": settings.preset,
        "train": args.train,
        "layers": settings.block.num_layers,
        "world_size": int(os.environ["WORLD_SIZE"]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": args.rounds,
        "calls_per_round": args.calls,
        "regions_per_call": regions,
        "median_ms": {name: round(statistics.median(times), 3) for name, times in ms.items()},
        "ratio_to_C": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "ratio_range": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
    }
    print(json.dumps({key: result[key] for key in ("preset", "train", "regions_per_call", "median_ms", "ratio_to_C")}))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
