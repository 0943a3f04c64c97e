"""A rank of torchrun: sums by size in eager, in compiled graphs and in CUDA graphs -> what was seen, as JSON.

torchrun ... tests/by_size/on_gpus.py FOLDER

Without GPUs it runs on gloo, where the op sums as always and nothing is captured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import tpcompile
from tpcompile import collectives
from tpcompile.by_size import Sums, Table, in_flight
from tpcompile.by_size.op import OP
from tpcompile.by_size.setting import gpu_of
from tpcompile.by_size.table import Cell, Row
from tpcompile.by_size.workspace import workspace_of
from tpcompile.errors import ConfigError
from tpcompile.torch_api import symmetric

IS_GPU = torch.cuda.is_available()
SMALL, LARGE = 64 << 10, 4 << 20
"""Bytes up to which one-shot and two-shot sum; NCCL above."""
SHAPES = {"one_shot": (8, 256), "two_shot": (256, 1024), "nccl": (2048, 2048)}
DTYPES = (torch.bfloat16, torch.float32)
WIDTH = (1 << 16) if IS_GPU else 256
"""Of products whose rows are sent in parts: 256 rows of it are two tiles for each multiprocessor."""
REPLAYS = 300 if IS_GPU else 30
MANY = 4096 if IS_GPU else 8
"""Tokens of a message for which the workspace grows; without GPUs there is none."""


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if IS_GPU else torch.device("cpu")
    if IS_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if IS_GPU else "gloo")
    found = {name: check(device) for name, check in CHECKS.items()}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()  # with CUDA graphs alive


def table(device: torch.device) -> Table:
    rows = (Row(up_to_bytes=SMALL, algorithm="one_shot"), Row(up_to_bytes=LARGE, algorithm="two_shot"))
    return Table(cells=(Cell(gpu=gpu_of(device), num_ranks=dist.get_world_size(), rows=rows),))


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Tensor]:
    """The tensor of every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(dist.get_world_size())]


def same_bits(x: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return all(torch.equal(part, parts[0]) for part in parts)


def is_sum(y: Tensor, parts: list[Tensor]) -> bool:
    total = torch.stack(parts).double().sum(0)
    limit = torch.finfo(y.dtype).eps
    return bool((y.double() - total).abs().max() <= limit * total.abs().max())


def values(device: torch.device) -> dict[str, bool]:
    """Of the op: each algorithm and dtype, a view at an odd address, a dtype that the kernels do not sum."""
    name, rows = dist.group.WORLD.group_name, table(device).rows(gpu_of(device), dist.get_world_size())
    found = {}
    for dtype in DTYPES:
        for algorithm, shape in SHAPES.items():
            parts = drawn(shape, dtype, device)
            y = OP(parts[dist.get_rank()], rows, name)
            found[f"{algorithm} {dtype}"] = is_sum(y, parts) and same_bits(y)
    parts = drawn((8 * 256 + 2,), torch.bfloat16, device)
    found["odd address"] = is_sum(
        OP(parts[dist.get_rank()][2:].view(8, 256), rows, name), [p[2:].view(8, 256) for p in parts]
    )
    halves = drawn(SHAPES["one_shot"], torch.float16, device)
    found["float16"] = is_sum(OP(halves[dist.get_rank()], rows, name), halves)
    return found


def in_turns(device: torch.device) -> bool:
    """Many sums of changing values, while ranks are apart by up to a millisecond: all are right."""
    name, rows = dist.group.WORLD.group_name, table(device).rows(gpu_of(device), dist.get_world_size())
    rank, right = dist.get_rank(), True
    for call in range(REPLAYS):
        shape = SHAPES["one_shot" if call % 2 else "two_shot"]
        if IS_GPU and (call + rank) % 3 == 0:
            torch.cuda._sleep(100_000 * (1 + call % 7))
        x = torch.full(shape, float(rank + call % 50), dtype=torch.bfloat16, device=device)
        y = OP(x, rows, name)
        expected = sum(other + call % 50 for other in range(dist.get_world_size()))
        right = right and bool((y == expected).all())
    return right


class Block(nn.Module):
    """Sums of two sizes, forward and backward; in the backward pass one of a weight that all ranks have, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = (collectives.copy_to_tp(one, group=dist.group.WORLD) for one in (x, self.scale))
        h = self.down(torch.relu(self.up(x) * scale))
        return torch.relu(collectives.all_reduce(h, group=dist.group.WORLD))


def run(program: Any, device: torch.device, **options: Any) -> Any:
    profile = "graphed" if IS_GPU else "default"
    return tpcompile.run(program, profile, all_reduce=table(device), clone_outputs=True, dynamic=False, **options)


def graphed(device: torch.device) -> dict[str, Any]:
    """Replays equal what NCCL sums, over new inputs and two sizes, the first again after the workspace grew."""
    torch.compiler.reset()
    block = Block().to(device, torch.bfloat16)
    found: dict[str, Any] = {"right": [], "same bits": []}
    step = run(block, device)
    with torch.no_grad():
        for seed, tokens in enumerate((8, 8, MANY, 8, MANY, 8)):
            (x, *_) = drawn((tokens, 256), torch.bfloat16, device, seed)
            y, expected = step(x), block(x)
            found["right"].append(torch.allclose(y, expected, rtol=2e-2, atol=2e-2))
            found["same bits"].append(same_bits(y))
    found["captures"] = step.num_captures
    KEPT.append(step)
    return found


KEPT: list[Any] = []
"""Live graphs, which the end of the process group must not wait for."""


def trained(device: torch.device) -> dict[str, Any]:
    """Gradients of a compiled step equal those of eager; forward and backward have the op in their code, once."""
    torch.compiler.reset()
    block = Block().to(device)
    (x, *_) = drawn((8, 256), torch.float32, device)
    x.requires_grad_()
    compiled = torch.compile(block, fullgraph=True, dynamic=False, options=Sums(table(device)).options)

    def step(program: Callable[[Tensor], Tensor]) -> list[Tensor]:
        block.zero_grad()
        x.grad = None
        program(x).square().sum().backward()
        return [one.grad.clone() for one in (x, *block.parameters()) if one.grad is not None]

    expected = step(block)
    got, codes = run_and_get_code(step, compiled)
    assert len(got) == len(expected) == 4
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, expected, strict=True)]
    ops = [code.count("torch.ops.tpcompile.all_reduce_by_size.default(") for code in codes]
    return {"close": all(close), "ops": ops, "alloc_id": any("alloc_id" in code for code in codes)}


def beside(x: Tensor) -> Tensor:
    """Eight sums in two rounds, two of them in flight at a time: twice the sum of `x`."""
    for _ in range(2):
        summed = [collectives.all_reduce_start(half * 1, group=dist.group.WORLD) for half in x.chunk(2)]
        again = [collectives.all_reduce_start(one.wait() / 2, group=dist.group.WORLD) for one in summed]
        x = torch.cat([one.wait() for one in again])
    return x


def of_products(x: Tensor) -> Tensor:
    """Two sums of products, one after the other, each row on its way while the next are computed: twice that of `x`."""
    for _ in range(2):
        x = collectives.all_reduce(x[:, :64] @ x.new_full((64, WIDTH), 1 / 64), group=dist.group.WORLD)
    return x


def pushed(device: torch.device, program: Callable[[Tensor], Tensor] = beside, width: int = 256) -> dict[str, Any]:
    """Sums in flight by copy engines, of changing values, while ranks are apart by up to a millisecond."""
    torch.compiler.reset()
    cell = Cell(gpu=gpu_of(device), num_ranks=2, rows=(), push_from_bytes=SMALL)
    profile = "graphed" if IS_GPU else "default"
    step = tpcompile.run(program, profile, all_reduce=Table(cells=(cell,)), clone_outputs=True, dynamic=False)
    rank, right = dist.get_rank(), []
    for call in range(REPLAYS if IS_GPU else 3):
        if IS_GPU and (call + rank) % 3 == 0:
            torch.cuda._sleep(100_000 * (1 + call % 7))
        tokens = 512 if call % 5 == 4 else 256
        y = step(torch.full((tokens, width), float(rank + call % 50), dtype=torch.bfloat16, device=device))
        right.append(bool((y == 2 * sum(other + call % 50 for other in range(2))).all()))
    KEPT.append(step)
    ops = [str(key[0]) for key in in_flight.OF_GROUPS]
    return {"right": all(right), "calls": len(right), "num_groups": len(ops)}


def pushed_in_two_groups(device: torch.device) -> dict[str, Any]:
    """As `of_products`, the second sum in a group of its own."""
    other = dist.new_group(list(range(dist.get_world_size())))

    def program(x: Tensor) -> Tensor:
        for group in (dist.group.WORLD, other):
            x = collectives.all_reduce(x[:, :64] @ x.new_full((64, WIDTH), 1 / 64), group=group)
        return x

    return pushed(device, program, WIDTH)


def two_groups(device: torch.device) -> dict[str, Any]:
    """A second group with the same ranks has a workspace of its own."""
    torch.compiler.reset()
    other = dist.new_group(list(range(dist.get_world_size())))

    def both(x: Tensor) -> Tensor:
        first = collectives.all_reduce(x * 2, group=dist.group.WORLD)
        return collectives.all_reduce(first + 1, group=other)

    parts = drawn(SHAPES["one_shot"], torch.float32, device)
    options = Sums(table(device)).options
    y = torch.compile(both, fullgraph=True, dynamic=False, options=options)(parts[dist.get_rank()])
    spaces = [workspace_of(group.group_name, device) for group in (dist.group.WORLD, other)]
    return {
        "right": torch.allclose(y, both(parts[dist.get_rank()])),
        "apart": spaces[0] is not spaces[1],
        "bytes": [space.size_bytes for space in spaces],
    }


def grown_in_a_capture(device: torch.device) -> str:
    """What is said where the workspace would have to grow; the group is new, so it has none."""
    group = dist.new_group(list(range(dist.get_world_size())))
    x = torch.ones(SHAPES["one_shot"], dtype=torch.bfloat16, device=device)
    if not IS_GPU:
        return ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            OP(x, f"{LARGE}:one_shot", group.group_name)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def multicast(device: torch.device) -> bool:
    return IS_GPU and symmetric.has_multicast(device)


CHECKS: dict[str, Callable[[torch.device], Any]] = {
    "values": values, "in turns": in_turns, "graphed": graphed, "pushed": pushed,
    "pushed products": partial(pushed, program=of_products, width=WIDTH),
    "pushed in two groups": pushed_in_two_groups, "trained": trained,
    "two groups": two_groups, "grown_in_capture": grown_in_a_capture, "multicast": multicast,
}  # fmt: skip
if __name__ == "__main__":
    main()
