"""A job that diverges in its first attempt and is healthy in the second; started by test_restart.

What a rank has to say goes into a file of its own: ranks share the launcher's stdout, and their lines interleave.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.sentinel import Sentinel

rank, world_size, attempt = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
# A prefix for torch itself, too: gloo would look for the processes of the attempt before.
client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
of_torch = dist.PrefixStore(f"torch_{attempt}", client)
dist.init_process_group("gloo", store=of_torch, rank=rank, world_size=world_size)
factor = rank + 1 if attempt == 0 else 2


@torch.compile(backend="eager")
def step(x: Tensor) -> Tensor:
    return funcol.all_reduce(x * factor, "sum", dist.group.WORLD)


with Sentinel() as sentinel:
    step(torch.ones(3))
Path(f"attempt_{attempt}_rank_{rank}").write_text(f"{sentinel.stats['compiles']} compiles")
dist.destroy_process_group()
