"""A training loop whose ranks are compared in what they compiled: `capture` around it, `check` after it.

torchrun --nproc-per-node 2 examples/check_loop.py
torchrun --nproc-per-node 2 examples/check_loop.py --rank-constant   # red: a value of the rank in the graph
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile


class MLP(nn.Module):
    """Two matmuls, to be sharded by columns and by rows."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * self.scale)


def main() -> int:
    """The exit code of the verdict, on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # equal weights and batches on all ranks
    scale = 1.0 + dist.get_rank() if "--rank-constant" in sys.argv else 1.0
    model = MLP(16, scale)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")  # leave the backend out to compare kernels as well

    with tpcompile.capture(mesh) as run:
        for _ in range(3):
            compiled(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    verdict = tpcompile.check(run)  # every rank calls it, every rank gets the verdict
    verdict.print()  # on rank 0
    return verdict.exit_code


if __name__ == "__main__":
    dist.init_process_group("gloo")
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
