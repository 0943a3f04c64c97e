"""FSDP2 over one axis of a 2-D mesh, a plan over the other, layers compiled one by one; training."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.faults.drawn import frame

# place: file


class Block(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        h = self.down(torch.relu(self.up(x)))  # tag: entered
        # place: region x=h module=self group=self.group
        return x + h


def main() -> None:
    job = frame.start(dp=2)
    # place: setup
    model = nn.Sequential(Block(16, job.group), Block(16, job.group)).to(job.device)
    # place: built model=model layers=model
    for layer in model:
        parallelize_module(layer, job.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=job.mesh["dp"])
        layer.compile(backend=job.backend)  # site: compile
    fully_shard(model, mesh=job.mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    with job.watching():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(4, 8, 16, device=job.device)
            # place: loop x=x real=x batch=x half=x model=model
            loss = model(x).square().mean()  # site: call
            # place: called model=model again=model(x).mean() loss=loss
            loss.backward()  # site: backward
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
