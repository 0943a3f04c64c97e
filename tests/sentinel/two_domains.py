"""Two tensor-parallel domains of two ranks; rank 3 issues a different collective to its data-parallel peer, rank 1."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.sentinel import Sentinel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
with Sentinel(mesh=mesh, hang_after_s=0.5):
    for step in range(6):
        dist.all_reduce(torch.ones(4), group=tp)
        if dist.get_rank() == 3 and step == 3:
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=dp)
        dist.all_reduce(torch.ones(8), group=dp)
