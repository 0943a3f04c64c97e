"""Prompts and then tokens one by one, with a key-value cache of fixed size: two graphs of one module."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.drawn import frame

# place: file


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, total: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.heads = heads // dist.get_world_size(group)
        self.head_dim = width // heads
        inner = self.heads * self.head_dim
        self.table = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.register_buffer("keys", torch.zeros(2, self.heads, total, self.head_dim))
        self.register_buffer("values", torch.zeros(2, self.heads, total, self.head_dim))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:  # tag: entered
        x = self.table(ids)  # tag: entered
        # place: region x=x module=self group=self.group
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        mask = torch.arange(self.keys.shape[2], device=ids.device) <= positions[:, None]
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        y = self.out(y.transpose(1, 2).flatten(2))
        # place: region x=y module=self group=self.group
        y = funcol.all_reduce(y, "sum", self.group)
        return (x + y) @ self.table.weight.t()


def main() -> None:
    job = frame.start()
    # place: setup
    model = Decoder(40, 24, 6, 12, job.group).to(job.device)
    # place: built model=model two=model.qkv
    compiled = torch.compile(model, backend=job.backend, dynamic=False)  # site: compile
    with job.watching(), torch.no_grad():
        # place: start
        prompt = torch.randint(40, (2, 4), device=job.device)
        ids = compiled(prompt, torch.arange(4, device=job.device))[:, -1:].argmax(-1)  # tag: call
        for step in range(job.num_steps):
            position = torch.full((1,), 4 + step, device=job.device)
            # place: loop x=ids model=model
            logits = compiled(ids, position)  # site: call
            ids = logits.argmax(-1)
            # place: called model=model again=compiled(ids,position)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
