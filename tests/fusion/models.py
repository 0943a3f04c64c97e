"""Targets of `tpcompile fusion record`: a DTensor block and a feed-forward of a Llama."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tpcompile.target import TargetContext


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.next_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.down(F.silu(self.gate(h)) * self.up(h))
        return self.next_norm(x + y)


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def feed_forward(ctx: TargetContext) -> tpcompile.Target:
    """Settings: width, hidden, tokens, train."""
    width, tokens = ctx.settings.get("width", 64), ctx.settings.get("tokens", 32)
    torch.manual_seed(0)
    model = FeedForward(width, ctx.settings.get("hidden", 4 * width)).to(ctx.device, torch.bfloat16)
    if ctx.world_size > 1:
        parallelize_module(model, ctx.mesh["tp"], PLAN)
    x = torch.randn(tokens, width, device=ctx.device, dtype=torch.bfloat16)
    step = (lambda program, inputs: program(*inputs).sum().backward()) if ctx.settings.get("train") else None
    return tpcompile.Target(program=model, inputs=(x,), step=step)


def softmax(ctx: TargetContext) -> tpcompile.Target:
    """Settings: rows, of 4096 bfloat16 each."""
    x = torch.empty(ctx.settings.get("rows", 8), 4096, device=ctx.device, dtype=torch.bfloat16)
    return tpcompile.Target(program=lambda x: torch.softmax(x, -1), inputs=(x,))


def on_cpu(ctx: TargetContext) -> tpcompile.Target:
    """It does not use `ctx.device`."""
    torch.manual_seed(0)
    return tpcompile.Target(program=nn.Sequential(nn.Linear(24, 24), nn.ReLU()), inputs=(torch.rand(8, 24),))


def of_no_tensors(ctx: TargetContext) -> tpcompile.Target:
    """Neither weights nor inputs say on which device it computes."""
    return tpcompile.Target(program=lambda: torch.ones(64, 64).sin() + 1, inputs=())
