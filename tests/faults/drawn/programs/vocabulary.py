"""A vocabulary that the ranks do not divide, embedding and head as DTensors; two replicas with different lengths."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.faults.drawn import frame

# place: file

VOCABULARY = 33


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.table = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # tag: entered
        x = self.table(ids)  # tag: entered
        # place: region x=x module=self group=self.group
        x = x + torch.tanh(self.mix(x))
        # place: region x=x module=self group=self.group
        return self.head(x).float().logsumexp(-1).mean()


def main() -> None:
    job = frame.start(dp=2)
    # place: setup
    model = Model(16, job.group).to(job.device)
    # place: built model=model
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, job.mesh["tp"], plan)
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    replica = job.rank // job.tp
    with job.watching(), torch.no_grad():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            ids = torch.randint(VOCABULARY, (4, 6 + 2 * replica), device=job.device)
            # place: loop x=ids batch=ids half=ids model=model
            loss = compiled(ids)  # site: call
            print(f"step {step}: loss {loss.item():.4f}")
            # place: called model=model again=compiled(ids)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
