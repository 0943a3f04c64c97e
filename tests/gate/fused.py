"""A target whose kernels a setting of Inductor splits; `--set limit=1`, on all ranks or on `rank`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor import config

from tpcompile.target import Target, TargetContext


def build(ctx: TargetContext) -> Target:
    weight = torch.ones(16, 16)
    is_limited = ctx.settings.get("rank", ctx.rank) == ctx.rank
    config.max_fusion_size = ctx.settings["limit"] if is_limited else 64

    def program(x: Tensor) -> Tensor:
        y = torch.relu(x @ weight) + 1  # the first kernel
        return y.softmax(-1).sin()

    return Target(program=program, inputs=(torch.ones(8, 16),))
