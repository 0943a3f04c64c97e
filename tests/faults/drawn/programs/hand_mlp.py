"""A column- and a row-parallel linear by hand, one compiled module, inference."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.drawn import frame

# place: file


class Mlp(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 4 * width // dist.get_world_size(group)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        h = torch.relu(self.up(self.norm(x)))  # tag: entered
        # place: region x=h module=self group=self.group
        y = self.down(h)
        y = funcol.all_reduce(y, "sum", self.group)
        # place: region x=y module=self group=self.group
        return x + y


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(width, group) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        for layer in self.layers:
            x = layer(x)  # tag: entered
        return x


def main() -> None:
    job = frame.start()
    # place: setup
    model = Model(24, job.group).to(job.device)
    # place: built model=model layers=model.layers one=model.layers[0].up two=model.layers[1].up
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    # place: compiled model=model layers=model.layers
    with job.watching(), torch.no_grad():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(8, 16, 24, device=job.device)
            # place: loop x=x real=x batch=x half=x model=model
            compiled(x)  # site: call
            # place: called model=model again=compiled(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
