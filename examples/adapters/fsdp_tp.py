"""FSDP2 over one axis of a 2-D mesh, a DTensor plan over the other; blocks compiled one by one, trained.

torchrun --standalone --nproc-per-node 4 -m examples.adapters.fsdp_tp
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from examples.adapters.one_device import BACKEND, gradients, print_errors


class Block(nn.Module):
    """A norm and an MLP around the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return x_BSD + self.down(torch.relu(self.up(self.norm(x_BSD))))


def main() -> None:
    """Three steps; each data-parallel rank has its part of one batch."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(2)))
    batch = torch.randn(4, 8, 16)
    alone = copy.deepcopy(model)
    expected = alone(batch)
    expected.square().mean().backward()

    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
        block.compile(backend=BACKEND)
    fully_shard(model, mesh=mesh["dp"])
    part = slice(mesh.get_local_rank("dp"), None, mesh["dp"].size())

    with tpcompile.capture(mesh) as run:
        for _step in range(3):
            model.zero_grad()
            found = model(batch[part])
            found.square().mean().backward()
    tpcompile.check(run).print()

    print_errors(found, expected[part], gradients(model), gradients(alone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
