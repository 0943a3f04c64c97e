"""An inference server: warm-up over its shapes, then requests of these shapes in any order, the same on all ranks."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.drawn import frame

# place: file

SIZES = (2, 4, 8)


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 4 * width // dist.get_world_size(group)
        self.table = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # tag: entered
        x = self.table(ids)  # tag: entered
        # place: region x=x module=self group=self.group
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        y = funcol.all_reduce(y, "sum", self.group)
        # place: region x=y module=self group=self.group
        logits = (x + y) @ self.table.weight.t()
        # place: region x=logits module=self group=self.group
        return logits.argmax(-1)


class Server:
    """Answers requests; each is a batch of prompts."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        self.compiled = torch.compile(model, backend=backend, dynamic=False)  # site: server_compile

    def answer(self, ids: Tensor) -> list[int]:
        tokens = self.compiled(ids)  # site: call
        return tokens[:, -1].tolist()


def main() -> None:
    job = frame.start()
    # place: setup
    model = Model(48, 24, job.group).to(job.device).eval()
    # place: built model=model two=model.up
    server = Server(model, job.backend)
    with job.watching(), torch.inference_mode():
        # place: start
        for size in SIZES:
            server.answer(torch.zeros(size, 6, dtype=torch.long, device=job.device))
        for step in range(job.num_steps):
            torch.manual_seed(step)
            ids = torch.randint(48, (SIZES[step % 3], 6), device=job.device)
            # place: loop x=ids batch=ids model=model
            server.answer(ids)
            # place: called model=model again=server.answer(ids)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
