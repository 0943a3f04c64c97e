"""Targets of `tpcompile typecheck`: right and wrong modules, and what cannot be followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.linear import ColumnParallelLinear, RowParallelLinear
from tpcompile.target import TargetContext

WIDTH, HIDDEN = 8, 16


class Mlp(nn.Module):
    """Two linears with declared layouts."""

    def __init__(self, ctx: TargetContext, axis: str = "tp") -> None:
        super().__init__()
        comm = Collectives(ctx.mesh.get_group(axis))
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, bias=True, comm=comm)
        self.down = RowParallelLinear(HIDDEN, WIDTH, bias=True, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Plain(nn.Module):
    """A column-parallel and a row-parallel weight without a declared layout, summed or not."""

    def __init__(self, ctx: TargetContext, *, is_reduced: bool) -> None:
        super().__init__()
        self.group, self.is_reduced = ctx.mesh.get_group("tp"), is_reduced
        self.up = nn.Linear(WIDTH, HIDDEN // ctx.world_size, bias=False)
        self.down = nn.Linear(HIDDEN // ctx.world_size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        partial = self.down(torch.relu(self.up(tpcompile.collectives.copy_to_tp(x, group=self.group))))
        if not self.is_reduced:
            return torch.tanh(partial)  # fault: no reduce
        return torch.tanh(tpcompile.collectives.all_reduce(partial, group=self.group, dst="I"))


def _target(program: Any, ctx: TargetContext, **fields: Any) -> tpcompile.Target:
    inputs = (torch.ones(2, WIDTH, device=ctx.device),)
    return tpcompile.Target(program=program.to(ctx.device), inputs=inputs, **fields)


def right(ctx: TargetContext) -> tpcompile.Target:
    return _target(Mlp(ctx), ctx)


def compiled(ctx: TargetContext) -> tpcompile.Target:
    return _target(torch.compile(Mlp(ctx), backend="eager"), ctx, is_compiled=True)


def by_name(ctx: TargetContext) -> tpcompile.Target:
    return tpcompile.Target(program=Mlp(ctx), inputs={"x": torch.ones(2, WIDTH)})


def own_axis(ctx: TargetContext) -> tpcompile.Target:
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("dp", "model"))
    found = TargetContext(rank=ctx.rank, world_size=ctx.world_size, device=ctx.device, mesh=mesh, settings=ctx.settings)
    return _target(Mlp(found, "model"), ctx, mesh=mesh, axis=ctx.settings.get("axis", "model"))


def planned(ctx: TargetContext) -> tpcompile.Target:
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    parallelize_module(model, ctx.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _target(model, ctx)


def plain(ctx: TargetContext) -> tpcompile.Target:
    return _target(Plain(ctx, is_reduced=ctx.settings.get("reduce", True)), ctx)


def idle(ctx: TargetContext) -> tpcompile.Target:
    return _target(nn.Identity(), ctx)


def function(ctx: TargetContext) -> tpcompile.Target:
    return tpcompile.Target(program=torch.relu, inputs=(torch.ones(2),))


def raises(ctx: TargetContext) -> Any:
    raise LookupError("no such weights")
