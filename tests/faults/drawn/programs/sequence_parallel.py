"""Sequence parallelism by hand: gather before the linears, scatter behind them; forward and backward."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faults.drawn import frame
from tpcompile.collectives import all_gather_single, reduce_scatter_single

# place: file


class Layer(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 4 * width // dist.get_world_size(group)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        full = all_gather_single(self.norm(x), group=self.group, dim=1)  # tag: entered
        # place: region x=full module=self group=self.group
        y = self.down(torch.nn.functional.gelu(self.up(full)))
        y = reduce_scatter_single(y, group=self.group, dim=1)
        # place: region x=y module=self group=self.group
        return x + y


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, group) for _ in range(2)])

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with job.watching():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            tokens = torch.randn(4, 12, 24, device=job.device)
            shard = tokens.chunk(job.tp, dim=1)[job.rank % job.tp].contiguous()
            # place: loop x=shard real=shard batch=shard half=shard model=model
            loss = compiled(shard).square().mean()  # site: call
            # place: called model=model again=compiled(shard).mean() loss=loss
            loss.backward()  # site: backward
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
