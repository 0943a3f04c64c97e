"""Targets whose modules declare no layouts, as those of most users: the shapes on one rank say what is sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from tpcompile.collectives import all_reduce, copy_to_tp
from tpcompile.target import TargetContext

WIDTH = 16


class Mlp(nn.Module):
    """A column- and a row-parallel linear with a bias, which is added once unless `is_early`."""

    def __init__(self, tp: int, *, is_early: bool = False, hooks: bool = False) -> None:
        super().__init__()
        self.is_early = is_early
        self.up = nn.Parameter(torch.randn(4 * WIDTH // tp, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH // tp))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.hooks = hooks
        if hooks:
            self.scale.register_hook(lambda gradient: all_reduce(gradient, group=dist.group.WORLD))

    def forward(self, x: Tensor) -> Tensor:
        group: Any = dist.group.WORLD
        inside = copy_to_tp(x, group=group)
        inside = inside * (self.scale if self.hooks else copy_to_tp(self.scale, group=group))
        hidden = torch.relu(linear(inside, self.up))
        if self.is_early:
            return all_reduce(linear(hidden, self.down, self.bias), group=group)
        return all_reduce(linear(hidden, self.down), group=group) + self.bias


def _target(module: nn.Module) -> tuple[nn.Module, Tensor]:
    return module, torch.randn(4, WIDTH, requires_grad=True)


def right(ctx: TargetContext) -> tuple[nn.Module, Tensor]:
    return _target(Mlp(ctx.world_size))


def early_bias(ctx: TargetContext) -> tuple[nn.Module, Tensor]:
    return _target(Mlp(ctx.world_size, is_early=True))


def early_bias_for_several_ranks(ctx: TargetContext) -> tuple[nn.Module, Tensor]:
    assert ctx.world_size > 1, "for several ranks only"
    return early_bias(ctx)


def hooked(ctx: TargetContext) -> tuple[nn.Module, Tensor]:
    return _target(Mlp(ctx.world_size, hooks=True))
