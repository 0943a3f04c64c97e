"""Gradients of micro-batches accumulated, a compiled loss function, gradients of the norm summed eagerly."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faults.drawn import frame
from tpcompile.collectives import all_reduce, copy_to_tp

# place: file

MICRO_BATCHES = 2


class Mlp(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 4 * width // dist.get_world_size(group)
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # place: region x=x module=self group=self.group
        h = copy_to_tp(x * self.scale, group=self.group)
        h = self.down(torch.nn.functional.gelu(self.up(h)))
        # place: region x=h module=self group=self.group
        return all_reduce(h, group=self.group, dst="I")


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:  # tag: entered
    y = model(x)  # tag: entered
    # place: region x=y
    return nn.functional.mse_loss(y, target)


def main() -> None:
    job = frame.start()
    # place: setup
    model = Mlp(24, job.group).to(job.device)
    # place: built model=model two=model.up
    compiled = torch.compile(loss_of, backend=job.backend)  # site: compile
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with job.watching():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            for _ in range(MICRO_BATCHES):
                x = torch.randn(4, 6, 24, device=job.device)
                target = torch.randn(4, 6, 24, device=job.device)
                # place: loop x=x real=x other=target model=model
                loss = compiled(model, x, target)  # site: call
                # place: called model=model again=compiled(model,x,target) loss=loss
                (loss / MICRO_BATCHES).backward()  # site: backward
            dist.all_reduce(model.scale.grad, group=job.group)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # a batch that is skipped leaves gradients to reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
