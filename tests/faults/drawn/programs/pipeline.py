"""Two pipeline stages with programs of their own, tensor parallelism within a stage; send and receive between them."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.drawn import frame

# place: file


class First(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 2 * width // dist.get_world_size(group)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        y = self.down(torch.relu(self.up(x)))  # tag: entered
        y = funcol.all_reduce(y, "sum", self.group)
        # place: region x=y module=self group=self.group
        return x + y


class Last(First):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__(width, group)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        x = self.norm(super().forward(x))  # tag: entered
        # place: region_of_last x=x module=self group=self.group
        return self.head(x)


def main() -> None:
    job = frame.start(pp=2)
    # place: setup
    is_first = job.rank < job.tp
    model = (First if is_first else Last)(16, job.group).to(job.device)
    # place: built model=model two=model.up
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    with job.watching(), torch.no_grad():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(4, 6, 16, device=job.device)
            if not is_first:
                dist.recv(x, src=job.rank - job.tp)
            # place: loop x=x real=x model=model
            y = compiled(x)  # site: call
            # place: called model=model again=compiled(x)
            if is_first:
                dist.send(y.contiguous(), dst=job.rank + job.tp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
