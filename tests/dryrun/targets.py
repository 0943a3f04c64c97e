"""Targets of the tests: a feed-forward network on a DTensor plan, and the same with a fault on one rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tests.dryrun.reading import misbehave
from tpcompile.target import TargetContext


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + down(F.silu(up(x)))
        return x


class Faulty(nn.Module):
    """The same, with a fault after it on the rank `odd`."""

    def __init__(self, inner: nn.Module, fault: str, odd: int) -> None:
        super().__init__()
        self.inner, self.fault, self.odd = inner, fault, odd

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        x = self.inner(x)
        if self.fault == "constant":
            x = x * (1.0 + (dist.get_rank() == self.odd))  # fault: constant
        if self.fault == "branch" and dist.get_rank() == self.odd:
            x = x.tanh()  # fault: branch
        if self.fault == "break" and dist.get_rank() == self.odd:
            torch._dynamo.graph_break()  # fault: break
        return x


def build(ctx: TargetContext) -> tpcompile.Target:
    """Settings: fault and odd; width and layers."""
    settings = ctx.settings
    fault, odd, width = settings.get("fault", ""), settings.get("odd", -1), settings.get("width", 1024)
    num_layers, batch = settings.get("layers", 1), 4
    if fault == "raise" and ctx.rank == odd:
        raise ValueError("this rank cannot")  # fault: raise
    if fault == "layer" and dist.get_rank() == odd:  # fault: layer
        num_layers += 1
    if fault == "shape" and os.environ["RANK"] == str(odd):  # fault: shape
        batch = 3
    model: nn.Module = FeedForward(width, num_layers).to(ctx.device)
    plan = {f"layers.{n}": RowwiseParallel() if n % 2 else ColwiseParallel() for n in range(2 * num_layers)}
    parallelize_module(model, ctx.mesh["tp"], plan)
    if fault in ("constant", "branch", "break"):
        model = Faulty(model, fault, odd)
    return tpcompile.Target(program=model, inputs=(torch.randn(batch, width, device=ctx.device),))


def build_again(ctx: TargetContext) -> tpcompile.Target:
    """The same, where the rank `odd` does `again` when it is traced a second time; `folder` knows that it was."""
    settings = ctx.settings
    if ctx.rank == settings["odd"]:
        marks = [Path(settings["folder"], name) for name in ("first", "again")]
        next(mark for mark in marks if not mark.exists()).touch()
        if marks[1].exists():
            misbehave(settings["again"])
    return build(ctx)


def on_cuda(ctx: TargetContext) -> tpcompile.Target:
    """The same, written for GPUs."""
    torch.cuda.set_device(0)
    model = FeedForward(64, 1).cuda()
    parallelize_module(
        model.to("cuda:0"), ctx.mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    )
    return tpcompile.Target(program=torch.compile(model), inputs=(torch.randn(4, 64, device="cuda"),), is_compiled=True)


def nothing(ctx: TargetContext) -> tpcompile.Target:
    """A program of which nothing is compiled."""
    return tpcompile.Target(program=torch.compiler.disable(lambda x: x + 1), inputs=(torch.randn(4),), is_compiled=True)
