"""A DTensor plan with sequence parallelism (`parallelize_module`), compiled and trained.

torchrun --standalone --nproc-per-node 2 -m examples.adapters.dtensor_plan
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpcompile
from examples.adapters.one_device import BACKEND, gradients, print_errors


class Mlp(nn.Module):
    """Column- and row-parallel linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.down(torch.relu(self.up(x_BSD)))


class Model(nn.Module):
    """Embedding, norm, MLP and head, written for one device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.head = nn.Linear(width, 64)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] -> logits [B, S, V]."""
        x_BSD = self.embedding(ids_BS)
        return self.head(x_BSD + self.mlp(self.norm(x_BSD)))


def main() -> None:
    """Three steps on the same tokens, without an optimizer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model(16)
    ids = torch.randint(64, (2, 8))
    alone = copy.deepcopy(model)
    expected = alone(ids)
    expected.square().mean().backward()

    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)  # all ranks made the same weights
    compiled = torch.compile(model, backend=BACKEND)

    with tpcompile.capture(mesh) as run:
        for _step in range(3):
            model.zero_grad()
            found = compiled(ids)
            found.square().mean().backward()
    tpcompile.check(run).print()

    print_errors(found, expected, gradients(model), gradients(alone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
