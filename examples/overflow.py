"""A loop that is wrong on one rank: a batch overflows on rank 1 alone, which leaves out the sum of the gradients.

    tpcompile run -- torchrun --nproc-per-node 2 examples/overflow.py

It does not mention tpcompile; without it, it hangs or ends with weights that differ.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.compile(nn.Linear(8, 8), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def overflowed(loss: Tensor) -> Tensor:
    """True for a loss that no gradient should come from."""
    return not torch.isfinite(loss)


def synchronize() -> None:
    """Sum the gradients over the ranks."""
    for weight in model.parameters():
        dist.all_reduce(weight.grad)


for step in range(20):
    batch = torch.full((4, 8), float("inf") if (step, rank) == (12, 1) else 1.0)
    loss = model(batch).square().mean()
    loss.backward()
    if overflowed(loss):
        optimizer.zero_grad()
        continue
    synchronize()
    optimizer.step()
    optimizer.zero_grad()
