"""What ranks do in the tests of this folder: gloo, and a table that has rows for CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tpcompile import collectives
from tpcompile.by_size import Table, sums
from tpcompile.by_size.table import Cell, Row

LIMIT_BYTES = 4096
ON_CPU = Table(cells=(Cell(gpu="cpu", num_ranks=2, rows=(Row(up_to_bytes=LIMIT_BYTES, algorithm="two_shot"),)),))
OP = "torch.ops.tpcompile.all_reduce_by_size"
NCCL = "_c10d_functional.all_reduce"


def compiled(program: Any, **options: Any) -> Any:
    return torch.compile(program, fullgraph=True, options=sums(ON_CPU).options, **options)  # type: ignore[union-attr]


def block(x: Tensor) -> Tensor:
    return torch.relu(collectives.all_reduce(x * 2, group=dist.group.WORLD)) + 1


def codes_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Which op sums in the code for each shape, and whether the result is that of eager."""
    found = []
    for shape in shapes:
        torch.compiler.reset()
        x = torch.ones(shape, dtype=dtype) * (dist.get_rank() + 1)
        y, (code,) = run_and_get_code(compiled(block, dynamic=False), x)
        found.append({"op": code.count(f"{OP}.default("), "nccl": code.count(NCCL), "right": torch.equal(y, block(x))})
    return found
