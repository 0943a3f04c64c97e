"""A plain training loop: AdamW, gradient clipping over the group, activation checkpointing, one compiled module."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.faults.drawn import frame
from tpcompile.collectives import all_reduce, copy_to_tp

# place: file


class Layer(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 4 * width // dist.get_world_size(group)
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        h = copy_to_tp(self.norm(x), group=self.group)  # tag: entered
        h = torch.nn.functional.silu(self.gate(h)) * self.up(h)
        # place: region x=h module=self group=self.group
        y = all_reduce(self.down(h), group=self.group, dst="I")
        # place: region x=y module=self group=self.group
        return x + y


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, group) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # tag: entered
        return self.head(x).square().mean()


def clip(model: nn.Module, group: dist.ProcessGroup) -> None:
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=group)
    scale = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


def main() -> None:
    job = frame.start()
    # place: setup
    model = Model(24, job.group).to(job.device)
    # place: built model=model layers=model.layers one=model.layers[0].gate two=model.layers[0].up
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    # place: compiled model=model layers=model.layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with job.watching():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(6, 8, 24, device=job.device)
            # place: loop x=x real=x batch=x half=x model=model
            loss = compiled(x)  # site: call
            # place: called model=model again=compiled(x) loss=loss
            loss.backward()  # site: backward
            clip(model, job.group)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
