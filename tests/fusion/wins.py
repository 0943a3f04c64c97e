"""Targets of `tpcompile verify-win`: one that wins, and one for each cause of none."""

from __future__ import annotations

import sys

import torch
import torch._inductor.config
from torch import Tensor, nn

import tpcompile
from tpcompile.gate.target import TargetContext

torch._inductor.config.cpp.simdlen = None  # tests/preloaded.py has kernels without vectors, and these are timed


class Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = (x * 1.01 + 0.1).relu()
        return x


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = (x * 1.01).relu()
        print(end="", file=sys.stderr)  # breaks the graph
        return x + 1


class Counting(nn.Module):
    """A number that is new at each call is guarded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls % 2 else x + self.calls


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


class Library(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1024, 1024) / 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x @ self.w
        return x


def _target(module: nn.Module, ctx: TargetContext, *shape: int) -> tpcompile.Target:
    return tpcompile.Target(program=module.to(ctx.device), inputs=(torch.rand(shape, device=ctx.device),))


def pointwise(ctx: TargetContext) -> tpcompile.Target:
    return _target(Pointwise(), ctx, 512, 1024)


def broken(ctx: TargetContext) -> tpcompile.Target:
    return _target(Broken(), ctx, 8)


def counting(ctx: TargetContext) -> tpcompile.Target:
    return _target(Counting(), ctx, 8)


def wrong(ctx: TargetContext) -> tpcompile.Target:
    return _target(Wrong(), ctx, 512, 1024)


def wrong_later(ctx: TargetContext) -> tpcompile.Target:
    return _target(WrongLater(), ctx, 512, 1024)


def library(ctx: TargetContext) -> tpcompile.Target:
    return _target(Library(), ctx, 512, 1024)
