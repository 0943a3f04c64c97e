"""Targets of `tpcompile verify-win` with wrong outputs; the others are in repro/fusion/modes.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.target import TargetContext


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 if torch.compiler.is_compiling() else x * 2.0


class WrongLater(nn.Module):
    """As a CUDA graph that reads memory which is no longer its input's: right at first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return x * 2.0
        self.calls += 1
        return x * torch.where(self.calls > 5, 1.5, 2.0)


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("no such op here")


def _target(module: nn.Module, ctx: TargetContext, *shape: int) -> tpcompile.Target:
    return tpcompile.Target(program=module.to(ctx.device), inputs=(torch.rand(shape, device=ctx.device),))


def wrong(ctx: TargetContext) -> tpcompile.Target:
    return _target(Wrong(), ctx, 512, 1024)


def wrong_later(ctx: TargetContext) -> tpcompile.Target:
    return _target(WrongLater(), ctx, 512, 1024)


def raising(ctx: TargetContext) -> tpcompile.Target:
    return _target(Raising(), ctx, 8)
