"""Shares of replicated tensors and gathers of statistics: the check says what the numbers of real ranks say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.typecheck.scaled import PROGRAMS, SHARE, Scaled
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.sharding import ShardSpec
from tpcompile.testing import run_on_ranks
from tpcompile.typecheck import Report, check_types

WIDTH, HIDDEN = 8, 16
SHAPES = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "square": (WIDTH, WIDTH), "table": (4 * HIDDEN, WIDTH)}
LAYOUTS = {"up": 0, "down": 1}


class Module(nn.Module):
    """The parameters of a program, this rank's share of those that are sharded."""

    def __init__(self, program: Scaled, comm: Collectives, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm, self.program = comm, program
        seeded = torch.Generator().manual_seed(7)
        for name, shape in (SHAPES | {"bias": (WIDTH,)}).items():
            full = torch.randn(shape, generator=seeded, dtype=torch.float64).to(dtype)
            own = full.chunk(comm.size, LAYOUTS[name])[comm.rank] if name in LAYOUTS else full
            self.register_parameter(name, nn.Parameter(own.clone()))

    def shard_specs(self) -> dict[str, ShardSpec]:
        specs = {name: ShardSpec(dim, parts=(HIDDEN,)) for name, dim in LAYOUTS.items()}
        return {name: specs.get(name, ShardSpec()) for name, _ in self.named_parameters(recurse=False)}

    def forward(self, x: Tensor) -> Tensor:
        return self.program.forward(self, x)


def _numbers(program: Scaled, comm: Collectives) -> dict[str, Tensor]:
    """Output and gradients of this rank, of x too, in float64; the same upstream gradient on all ranks."""
    module = Module(program, comm, torch.float64)
    seeded = torch.Generator().manual_seed(11)
    x = torch.randn(2, 6, WIDTH, generator=seeded, dtype=torch.float64).requires_grad_()
    output = module(x)
    output.backward(torch.randn(output.shape, generator=seeded, dtype=torch.float64))
    grads = {name: tensor.grad for name, tensor in (*module.named_parameters(), ("x", x)) if tensor.grad is not None}
    return {"output": output.detach(), **grads}
