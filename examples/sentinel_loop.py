"""A loop that a sentinel watches: it ends a job whose ranks compile differently, before it hangs.

torchrun --nproc-per-node 2 examples/sentinel_loop.py
torchrun --nproc-per-node 2 examples/sentinel_loop.py --odd-batch   # rank 1 recompiles alone: exit code 1
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.sentinel import Sentinel

STEPS = 8


class Layer(nn.Module):
    """A linear layer whose output is summed over the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        dist.all_reduce(y, group=self.group)
        return y


def main() -> None:
    """Run the loop."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    layer = torch.compile(Layer(mesh.get_group("tp")), backend="aot_eager", dynamic=False)
    is_odd = "--odd-batch" in sys.argv and dist.get_rank() == 1
    with torch.no_grad(), Sentinel(mesh=mesh, axis="tp"):  # on every rank, after init_process_group
        for step in range(STEPS):
            size = 5 if is_odd and step == STEPS // 2 else 4
            layer(torch.ones(size, 8))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: {STEPS} steps")
    dist.destroy_process_group()
