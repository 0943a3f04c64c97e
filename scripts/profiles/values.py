"""Replays beside compiled calls, on a stack of 4 blocks: PRESET NUM_REPLAYS FILE.json, under torchrun."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile import config, profiles
from tpcompile.collectives.strategies import Collectives
from tpcompile.fastpath import tp_region
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights

NUM_INPUTS = 5
SETTLED = 200
"""Replays before memory is looked at for the first time."""
GROWTH = {"reserved_bytes": 0, "allocated_bytes": 0, "num_fds": 0, "rss_bytes": 32 << 20}
"""Most that may be added by all later replays; allocators of the host keep some pages."""


class Runner:
    """One stack, and its inputs."""

    def __init__(self, preset: str) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.block = config.load(preset, ["block.num_layers=4"]).block
        self.dtype: torch.dtype = getattr(torch, self.block.dtype)
        with torch.device("meta"):
            stack = TransformerStack(self.block, Collectives(dist.group.WORLD), num_layers=4)
        self.stack: nn.Module = stack.to_empty(device=self.device)
        full = draw_stack_weights(self.block, seed=0, dtype=self.dtype, device=self.device)
        load_full_state_dict(self.stack, full)

    def inputs(self, seed: int, seq_len: int | None = None) -> BlockInputs:
        length = seq_len or self.block.seq_len
        return draw_inputs(self.block, seed=seed, device=self.device, dtype=self.dtype, seq_len=length)

    def step(self, compiled: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
        """Forward and backward into new gradients, which it returns."""
        stack = self.stack

        def step(*inputs: Any) -> list[Tensor]:
            stack.zero_grad(set_to_none=True)
            y = compiled(*inputs)
            y.float().square().mean().backward()
            found = [y.detach(), *(p.grad for p in stack.parameters())]
            stack.zero_grad(set_to_none=True)
            return found

        return step


def differing(got: Any, wanted: Any) -> int:
    """Tensors that are not equal bit for bit."""
    pairs = zip(as_list(got), as_list(wanted), strict=True)
    return sum(not torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def as_list(value: Any) -> list[Tensor]:
    tensors = value if isinstance(value, list) else [value]
    return [each.detach().clone(memory_format=torch.contiguous_format) for each in tensors]


def compared(runner: Runner, call: Callable[..., Any], compiled: Callable[..., Any]) -> dict[str, Any]:
    """Over changing inputs and a second length, to and fro."""
    short = runner.block.seq_len - max(1, runner.block.seq_len // 4)
    lengths = [None] * NUM_INPUTS + [short, None, short]
    found = []
    for seed, length in enumerate(lengths):
        inputs = runner.inputs(seed, length)
        wanted = as_list(compiled(*inputs))
        found.append(differing(call(*inputs), wanted))
    return {"calls": len(found), "differing_tensors": found, "captures": call.num_captures, "replays": call.num_replays}


def usage() -> dict[str, int]:
    torch.cuda.synchronize()
    process = psutil.Process()
    return {
        "reserved_bytes": torch.cuda.memory_reserved(),
        "allocated_bytes": torch.cuda.memory_allocated(),
        "num_fds": process.num_fds(),
        "rss_bytes": process.memory_info().rss,
    }


def replayed(runner: Runner, call: Callable[..., Any], times: int) -> dict[str, Any]:
    """Growth of memory over many replays, with changing inputs."""
    every = [runner.inputs(seed) for seed in range(NUM_INPUTS)]
    for number in range(SETTLED):
        call(*every[number % NUM_INPUTS])
    before = usage()
    started = time.perf_counter()
    for number in range(times):
        call(*every[number % NUM_INPUTS])
    after = usage()
    seconds = time.perf_counter() - started
    growth = {name: after[name] - before[name] for name in before}
    return {"replays": times, "ms": round(seconds / times * 1e3, 4), "growth": growth, "usage": after}


def timed(calls: dict[str, Callable[[], Any]], *, rounds: int = 7, times: int = 20) -> dict[str, float]:
    """Median ms of a call, in interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(times):
                call()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - started) / times * 1e3)
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def problems(found: dict[str, Any]) -> list[str]:
    said = []
    for part in ("forward", "step"):
        if any(found[part]["differing_tensors"]):
            said.append(f"{part}: replays differ from compiled calls: {found[part]['differing_tensors']}")
        if found[part]["captures"] != 2 or found[part]["replays"] != found[part]["calls"]:
            said.append(f"{part}: {found[part]}")
    growth = found["many"]["growth"]
    said += [f"{name} grew by {growth[name]}" for name, most in GROWTH.items() if growth[name] > most]
    return said


def main() -> None:
    preset, replays, file = sys.argv[1:]
    # Attention's backward adds in any order otherwise, and two compiled calls differ.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    runner = Runner(preset)
    found: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        if dist.get_rank() == 0:
            Path(file).write_text(json.dumps(found))
            print(name, value, flush=True)

    compiled = torch.compile(runner.stack, dynamic=False, fullgraph=True)
    with tp_region(dist.get_world_size()):
        with torch.no_grad(), profiles.run(compiled, "graphed", is_compiled=True) as call:
            keep("forward", compared(runner, call, compiled))
            inputs = runner.inputs(0)
            keep("ms", timed({"default": lambda: compiled(*inputs), "graphed": lambda: call(*inputs)}))
            keep("many", replayed(runner, call, int(replays)))
        step = runner.step(compiled)
        with profiles.run(step, "graphed", is_compiled=True) as call:
            keep("step", compared(runner, call, step))
            keep("step_ms", timed({"default": lambda: step(*inputs), "graphed": lambda: call(*inputs)}, times=10))
    dist.destroy_process_group()
    said = problems(found)
    keep_going = "\n".join(said)
    if said:
        sys.exit(f"rank {os.environ['RANK']}:\n{keep_going}")


if __name__ == "__main__":
    main()
