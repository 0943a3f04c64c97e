"""Tensor parallelism by torch's own DTensor plans, alone and under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.faults.healthy.program import Run, program, sgd


class _Block(nn.Module):
    """Norm and MLP, written for one device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.down(torch.relu(self.up(self.norm(x_BSD))))


def _block(run: Run) -> _Block:
    torch.manual_seed(run.draw.seed)
    return _Block(run.draw.width).to(run.device)


def _drive(run: Run, program: Any, module: nn.Module) -> None:
    optimizer = sgd(module)
    for step in run.steps():
        run.advance(program, optimizer, run.data(step))


@program(sizes=(2, 4))
def dtensor_column_row(run: Run) -> None:
    """`parallelize_module` with a column- and a row-parallel linear."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    block = parallelize_module(_block(run), run.mesh["tp"], plan)
    _drive(run, run.compile(block), block)


@program(backends=("aot_eager", "inductor"))
def dtensor_sequence_parallel(run: Run) -> None:
    """The norm on shards of the sequence."""
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    block = parallelize_module(_block(run), run.mesh["tp"], plan)
    parallelize_module(block, run.mesh["tp"], {"up": ColwiseParallel()})
    _drive(run, run.compile(block), block)


@program(sizes=(4,), dp=2, backends=("aot_eager",), trains=(True,))
def dtensor_under_fsdp(run: Run) -> None:
    """FSDP2 over one axis, the plan over the other; layers compiled one by one."""
    model = nn.Sequential(_block(run), _block(run))
    for layer in model:
        parallelize_module(layer, run.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=run.mesh["dp"])
        layer.compile(backend=run.draw.backend)
    fully_shard(model, mesh=run.mesh["dp"])
    _drive(run, model, model)


@program(sizes=(4,), dp=2, backends=("aot_eager",), trains=(True,))
def ours_under_fsdp(run: Run) -> None:
    """FSDP2 over one axis, our collectives over the other."""
    model = nn.Sequential(run.mlp(), run.mlp(seed=1))
    for layer in model:
        fully_shard(layer, mesh=run.mesh["dp"])
        layer.compile(backend=run.draw.backend)
    fully_shard(model, mesh=run.mesh["dp"])
    _drive(run, model, model)
