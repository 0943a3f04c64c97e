"""A program that Dynamo traces alike on all ranks, and of which one rank makes different kernels."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import tpcompile
from tpcompile.target import TargetContext


def build(ctx: TargetContext) -> tpcompile.Target:
    """Settings: odd, the rank that fuses nothing."""
    group = ctx.mesh.get_group("tp")
    if dist.get_rank() == ctx.settings.get("odd", -1):
        from torch._inductor.scheduler import Scheduler

        Scheduler.can_fuse = lambda *_, **__: False  # type: ignore[method-assign]

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(x, group=group)
        return x.relu(), x.sin()

    return tpcompile.Target(program=program, inputs=(torch.randn(64, 64, device=ctx.device),))
