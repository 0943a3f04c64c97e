"""Experts over the group: tokens travel in an all-to-all and back, with a capacity; inference."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.drawn import frame

# place: file


class Experts(nn.Module):
    """One expert a rank; every rank sends `capacity` tokens to each."""

    def __init__(self, width: int, capacity: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.capacity = capacity
        self.size = dist.get_world_size(group)
        self.router = nn.Linear(width, self.size, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        weights = self.router(x).softmax(-1)  # tag: entered
        best = weights.topk(self.capacity, dim=0).indices.t().flatten()
        sent = x[best]
        # place: region x=sent module=self group=self.group
        splits = [self.capacity] * self.size
        received = funcol.all_to_all_single(sent, splits, splits, self.group)
        done = self.down(torch.relu(self.up(received)))
        # place: region x=done module=self group=self.group
        back = funcol.all_to_all_single(done, splits, splits, self.group)
        return x.index_add(0, best, back)


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(width, 3, group) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        for layer in self.layers:
            x = layer(x)  # tag: entered
        return x


def main() -> None:
    job = frame.start()
    # place: setup
    model = Model(16, job.group).to(job.device)
    # place: built model=model layers=model.layers one=model.layers[0].up two=model.layers[1].up
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    # place: compiled model=model layers=model.layers
    with job.watching(), torch.no_grad():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            tokens = torch.randn(24, 16, device=job.device)
            # place: loop x=tokens real=tokens batch=tokens half=tokens model=model
            compiled(tokens)  # site: call
            # place: called model=model again=compiled(tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
