"""Functional collectives by hand in a compiled function of two tensors."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.faults.drawn import frame

# place: file


def mixed(x: Tensor, residual: Tensor, group: dist.ProcessGroup) -> Tensor:  # tag: entered
    # place: region x=x group=group
    shard = funcol.reduce_scatter_tensor(x * 0.5, "sum", 0, group)  # tag: entered
    # place: region x=shard group=group
    full = funcol.all_gather_tensor(torch.tanh(shard), 0, group)
    # place: region x=full group=group
    return full + residual


def normalised(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = funcol.all_reduce((x * x).sum(-1, keepdim=True), "sum", group)
    # place: region x=total group=group
    return x * torch.rsqrt(total + 1e-6)


def main() -> None:
    job = frame.start()
    # place: setup
    mix = torch.compile(mixed, backend=job.backend)  # site: compile
    norm = torch.compile(normalised, backend=job.backend)
    with job.watching():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            x = torch.randn(12, 8, device=job.device)
            residual = torch.randn(12, 8, device=job.device)
            # place: loop x=x real=x other=residual
            y = mix(x, residual, job.group)  # site: call
            norm(y, job.group)  # tag: call
            # place: called again=mix(x,residual,job.group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
