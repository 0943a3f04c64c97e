"""Targets of `tpcompile verify-win` with wrong outputs; the others are in repro/fusion/modes.py."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
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


class InGroup(nn.Module):
    """As layers of Megatron, which keep their process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        dist.all_reduce(y, group=self.group)
        return y


class Locked(nn.Module):
    """It holds something that cannot be copied and is no handle of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def _target(module: nn.Module, ctx: TargetContext, *shape: int) -> tpcompile.Target:
    return tpcompile.Target(program=module.to(ctx.device), inputs=(torch.rand(shape, device=ctx.device),))


def wrong(ctx: TargetContext) -> tpcompile.Target:
    return _target(Wrong(), ctx, 512, 1024)


def wrong_later(ctx: TargetContext) -> tpcompile.Target:
    return _target(WrongLater(), ctx, 512, 1024)


def raising(ctx: TargetContext) -> tpcompile.Target:
    return _target(Raising(), ctx, 8)


def in_group(ctx: TargetContext) -> tpcompile.Target:
    return _target(InGroup(ctx.mesh.get_group("tp")), ctx, 8, 16)


def locked(ctx: TargetContext) -> tpcompile.Target:
    return _target(Locked(), ctx, 8)
