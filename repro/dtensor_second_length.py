"""torch 2.13: a DTensor plan, compiled with gradients, raises RecursionError at the first call with a second length.

    torchrun --standalone --nproc-per-node 2 repro/dtensor_second_length.py

AOTAutograd runs out of stack while it traces the backward of the plan's views with a dynamic length. Without gradients,
with `dynamic=False`, or with a functional all-reduce in place of the plan, the second length compiles. No issue was
found upstream. Exit status 0 when it raises so, 1 when it does not.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    """A column-parallel linear and a row-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        return self.down(torch.relu(self.up(x)))


def outcome(*, has_gradients: bool = True) -> str:
    """What the call with a second length raises; empty when it compiles."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = torch.compile(model.requires_grad_(has_gradients), backend="aot_eager")
    compiled(torch.ones(2, 8, 8))
    try:
        compiled(torch.ones(2, 6, 8))
    except Exception as error:  # whatever it raises is the outcome
        return str(error)
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = outcome()
    print(found.splitlines()[:2] or "the second length compiles")
    dist.destroy_process_group()
    sys.exit("RecursionError" not in found)
