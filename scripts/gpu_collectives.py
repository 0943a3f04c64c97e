"""Every wrapper under torchrun: eager and compiled against a local reference, and inside CUDA graphs.

    torchrun --standalone --nproc-per-node 2 scripts/gpu_collectives.py [--backend inductor]

NCCL on CUDA, gloo on CPU where the CUDA-graph part is skipped. Prints one JSON on rank 0; exit code 1 when a rank
found a difference. The reference is computed on every rank from the inputs of all ranks, in float64.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives import api as tp
from tpcompile.collectives import asynchronous as later

Wrapper = Callable[[Tensor], Tensor]
Reference = Callable[[Tensor], Tensor]


def wrappers(group: Any) -> dict[str, tuple[Wrapper, Reference]]:
    """Name -> the call on this rank's [8, 8 * n] input, and the same from all inputs [n, 8, 8 * n]."""
    rank, world = group.rank(), group.size()
    found: dict[str, tuple[Wrapper, Reference]] = {
        "copy_to_tp": (lambda x: tp.copy_to_tp(x, group=group), lambda full: full[rank])
    }
    reduced = {"sum": lambda f: f.sum(0), "avg": lambda f: f.mean(0), "max": lambda f: f.amax(0)}
    for op, reference in reduced.items():
        found[f"all_reduce {op}"] = (lambda x, op=op: tp.all_reduce(x, group=group, op=op, dst="R"), reference)
    for src in range(world):
        found[f"broadcast {src}"] = (lambda x, src=src: tp.broadcast(x, src=src, group=group), lambda f, s=src: f[s])
    found["all_reduce_start"] = (lambda x: later.all_reduce_start(x, group=group).wait(), reduced["sum"])
    for dim in (0, 1):
        found |= _moves(dim, group, rank, world)
    return found


def _moves(dim: int, group: Any, rank: int, world: int) -> dict[str, tuple[Wrapper, Reference]]:
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(world, dim)

    calls: dict[str, tuple[Wrapper, Reference]] = {
        "all_gather R": (lambda x: tp.all_gather_single(x, dim=dim, group=group), lambda f: torch.cat([*f], dim)),
        "all_gather I": (
            lambda x: tp.all_gather_single(x, dim=dim, group=group, dst="I"),
            lambda f: torch.cat([*f], dim),
        ),
        "reduce_scatter": (
            lambda x: tp.reduce_scatter_single(x, dim=dim, group=group),
            lambda f: parts(f.sum(0))[rank],
        ),
        "all_to_all": (
            lambda x: tp.all_to_all_single(x, dim=dim, group=group),
            lambda f: torch.cat([parts(x)[rank] for x in f], dim),
        ),
        "scatter": (lambda x: tp.scatter_single(x, dim=dim, group=group), lambda f: parts(f[rank])[rank]),
        "all_gather_start": (
            lambda x: later.all_gather_start(x, dim=dim, group=group).wait(),
            lambda f: torch.cat([*f], dim),
        ),
        "reduce_scatter_start": (
            lambda x: later.reduce_scatter_start(x, dim=dim, group=group).wait(),
            lambda f: parts(f.sum(0))[rank],
        ),
    }
    return {f"{name} dim {dim}": pair for name, pair in calls.items()}


def inputs(rank: int, world: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The input of this rank, and those of all ranks in float64."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(-3, 4, (world, 8, 8 * world), generator=generator).to(device)
    return full[rank].to(dtype).requires_grad_(dtype.is_floating_point), full.double()


def checks(
    name: str, pair: tuple[Wrapper, Reference], group: Any, device: torch.device, backend: str
) -> dict[str, bool]:
    """Eager against the reference, compiled against eager, values and gradients."""
    call, reference = pair
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, full = inputs(group.rank(), group.size(), device, dtype)
        eager = call(x)
        found[f"{name} {dtype} value"] = torch.allclose(eager.double(), reference(full), rtol=8e-3)
        torch._dynamo.reset()
        twin = x.detach().clone().requires_grad_()
        compiled = torch.compile(call, backend=backend, fullgraph=True)(twin)
        for y in (eager, compiled):
            y.backward(torch.ones_like(y))
        same = torch.equal(eager, compiled) and torch.equal(x.grad, twin.grad)
        found[f"{name} {dtype} compiled"] = same and type(compiled) is Tensor
    return found


def captured(name: str, pair: tuple[Wrapper, Reference], group: Any, device: torch.device) -> dict[str, bool]:
    """A CUDA graph made by hand and one made by mode="reduce-overhead", replayed with a different input."""
    call, reference = pair
    x, full = inputs(group.rank(), group.size(), device, torch.float32)
    x = x.detach()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = call(x)
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    found = {f"{name} captured": torch.equal(y.double(), reference(2 * full))}
    torch._dynamo.reset()
    fast = torch.compile(lambda x: call(x * 1) * 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        y = fast(x).clone()
    found[f"{name} reduce-overhead"] = torch.equal(y.double(), reference(2 * full))
    graph.reset()  # a live graph holds the communicator, and destroy_process_group would wait for it forever
    torch._dynamo.reset()
    return found


def main() -> None:
    """Run all checks and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--only", default="", help="part of a wrapper's name")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    found: dict[str, bool] = {}
    chosen = {name: pair for name, pair in wrappers(dist.group.WORLD).items() if args.only in name}
    for name, pair in chosen.items():
        found |= checks(name, pair, dist.group.WORLD, device, args.backend)
        found |= captured(name, pair, dist.group.WORLD, device) if cuda else {}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [name for name, right in found.items() if not right])
    if dist.get_rank() == 0:
        result = {
            "checks": len(found),
            "cuda_graphs": "checked" if cuda else "skipped, no CUDA",
            "failed_by_rank": everyone,
            "world_size": dist.get_world_size(),
            "machine": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
            "command": " ".join(sys.argv),
        }
        text = json.dumps(result, sort_keys=True)
        print(text)
        if args.out:
            args.out.write_text(text + "\n")
    gc.collect()
    dist.destroy_process_group()
    sys.exit(1 if any(everyone) else 0)


if __name__ == "__main__":
    main()
