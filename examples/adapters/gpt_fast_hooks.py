"""gpt-fast's way: shards cut by hand, and forward hooks that call functional collectives; inference.

torchrun --standalone --nproc-per-node 2 -m examples.adapters.gpt_fast_hooks
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol  # noqa: TID251 - as gpt-fast has it
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from examples.adapters.one_device import BACKEND, print_errors


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A norm and an MLP around the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y = self.norm(x)
        return x + self.feed_forward(y)


def shard(linear: nn.Linear, dim: int) -> None:
    """Keep this rank's rows (dim 0) or columns (dim 1)."""
    linear.weight = nn.Parameter(linear.weight.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


def apply_tp(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Column-, column- and row-parallel; the hook reduces the result of the last."""

    def reduce(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return funcol.all_reduce(output, "sum", group)

    for block in model.children():
        shard(block.feed_forward.w1, 0)
        shard(block.feed_forward.w3, 0)
        shard(block.feed_forward.w2, 1)
        block.feed_forward.register_forward_hook(reduce)


@torch.no_grad()
def main() -> None:
    """Four decoding steps."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(2)))
    x = torch.randn(1, 1, 16)
    expected = model(x)

    apply_tp(model, mesh.get_group("tp"))
    decode = torch.compile(model, backend=BACKEND, fullgraph=True)

    with tpcompile.capture(mesh) as run:
        for _step in range(4):
            found = decode(x)
    tpcompile.check(run).print()

    print_errors(found, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
