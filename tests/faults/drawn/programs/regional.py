"""Every layer compiled by itself, with eager code between them: norms of activations over the group."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.drawn import frame

# place: file


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.heads = heads // dist.get_world_size(group)
        self.head_dim = width // heads
        inner = self.heads * self.head_dim
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # tag: entered
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        # place: region x=v module=self group=self.group
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        y = funcol.all_reduce(y, "sum", self.group)
        # place: region x=y module=self group=self.group
        return x + y


def main() -> None:
    job = frame.start()
    # place: setup
    model = nn.ModuleList([Attention(24, 6, job.group) for _ in range(3)]).to(job.device)
    # place: built model=model layers=model one=model[0].qkv two=model[1].qkv
    layers = [torch.compile(layer, backend=job.backend) for layer in model]  # site: compile
    with job.watching(), torch.no_grad():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(4, 8, 24, device=job.device)
            # place: loop x=x real=x batch=x half=x model=model
            for layer in layers:
                x = layer(x)  # site: call
            norm = x.square().mean()
            dist.all_reduce(norm, group=job.group)
            # place: called model=model again=layers[0](x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
