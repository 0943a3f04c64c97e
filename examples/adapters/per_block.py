"""torchtitan's way: a DTensor plan, and each block compiled alone with `fullgraph=True`; trained.

torchrun --standalone --nproc-per-node 2 -m examples.adapters.per_block
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from examples.adapters.one_device import BACKEND, gradients, print_errors


class Block(nn.Module):
    """Causal attention and MLP; heads are counted from the width that a rank has."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y_BSD = self.attention_norm(x_BSD)
        q, k, v = (w(y_BSD).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.wo(y.transpose(1, 2).flatten(2))
        return x_BSD + self.down(torch.relu(self.up(self.norm(x_BSD))))


def main() -> None:
    """Three steps on the same input, without an optimizer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16, 4) for _ in range(3)))
    x_BSD = torch.randn(2, 8, 16)
    alone = copy.deepcopy(model)
    expected = alone(x_BSD)
    expected.square().mean().backward()

    column, row = ColwiseParallel(), RowwiseParallel()
    for block in model:
        parallelize_module(block, mesh, {"w[qkv]": column, "wo": row, "up": column, "down": row})
        block.compile(backend=BACKEND, fullgraph=True)

    with tpcompile.capture(mesh) as run:
        for _step in range(3):
            model.zero_grad()
            found = model(x_BSD)
            found.square().mean().backward()
    tpcompile.check(run).print()

    print_errors(found, expected, gradients(model), gradients(alone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
