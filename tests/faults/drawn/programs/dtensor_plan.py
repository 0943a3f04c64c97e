"""Two MLP blocks under a `parallelize_module` plan, forward and backward, SGD."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.faults.drawn import frame

# place: file


class Block(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        h = self.norm(x)  # tag: entered
        # place: region x=h module=self group=self.group
        h = self.down(torch.relu(self.up(h)))
        # place: region x=h module=self group=self.group
        return x + h


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, group) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        for block in self.blocks:
            x = block(x)  # tag: entered
        return x


def main() -> None:
    job = frame.start()
    # place: setup
    model = Model(24, job.group).to(job.device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, job.mesh["tp"], plan)
    # place: built model=model layers=model.blocks one=model.blocks[0].norm two=model.blocks[1].norm
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    # place: compiled model=model layers=model.blocks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    with job.watching():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(6, 8, 24, device=job.device)
            # place: loop x=x real=x batch=x half=x model=model
            loss = compiled(x).square().mean()  # site: call
            # place: called model=model again=compiled(x).mean() loss=loss
            loss.backward()  # site: backward
            # place: trained model=model
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
