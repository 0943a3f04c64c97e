"""Two tensor-parallel domains of two ranks; rank 2 calls a barrier of all ranks before its data-parallel all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.sentinel import Sentinel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
is_early = dist.get_rank() == 2
with Sentinel(mesh=mesh, hang_after_s=0.5):
    for step in range(6):
        dist.all_reduce(torch.ones(4), group=tp)
        if is_early and step == 3:
            dist.barrier()  # too early
        dist.all_reduce(torch.ones(8), group=dp)
        if step == 3 and not is_early:
            dist.barrier()
