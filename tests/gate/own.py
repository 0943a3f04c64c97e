"""Programs of users, for `--target tests.gate.own:NAME`; `--set fault=...` puts a fault into them.

A fault is in the model, on a line of its own that is marked with a comment.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tpcompile.collectives.strategies import Collectives
from tpcompile.target import TargetContext

WIDTH, HIDDEN = 16, 32


class Full(nn.Module):
    """An MLP on one device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        return self.down(torch.relu(self.up(x)))  # plan


class Faulty(nn.Module):
    """What faults have in common."""

    fault = ""

    def before(self, x: Tensor) -> Tensor:
        """Faults ahead of the model."""
        if self.fault == "constant":
            x = x * (1.0 + dist.get_rank())  # constant
        if self.fault == "break" and dist.get_rank() == 1:
            print("hidden", x.shape)  # break
        if self.fault == "dtype" and dist.get_rank() == 1:
            x = x.double().float()  # dtype
        return x


class Functional(Faulty):
    """The MLP in shards, with a functional collective."""

    def __init__(self, full: Full, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Parameter(full.up.weight.detach().chunk(group.size(), 0)[group.rank()].clone())
        self.down = nn.Parameter(full.down.weight.detach().chunk(group.size(), 1)[group.rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        hidden = torch.relu(self.before(x) @ self.up.T)
        if self.fault == "layout" and dist.get_rank() == 1:
            hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)  # layout
        partial = hidden @ self.down.T
        if self.fault == "missing" and dist.get_rank() == 1:
            return partial
        if self.fault == "wrong":
            partial = 2 * partial
        if self.fault == "raises":
            return funcol.all_reduce(partial, "avg", self.group)  # raises: it has no backward
        summed = funcol.all_reduce(partial, "sum", self.group)  # collective
        if self.fault == "one more" and dist.get_rank() != 1:
            summed = funcol.all_reduce(summed, "sum", self.group)  # one more
        return summed


class Trained(Functional):
    """The MLP in shards, with collectives of tpcompile, which have gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        comm = Collectives(self.group)
        if self.fault != "no copy":
            x = comm.copy_to_tp(x)
        return comm.all_reduce(torch.relu(x @ self.up.T) @ self.down.T)


class Planned(Faulty):
    """The MLP under a DTensor plan."""

    def __init__(self, full: Full, mesh: Any, fault: str) -> None:
        super().__init__()
        self.fault = fault
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if fault == "layout" and dist.get_rank() == 1:
            plan["down"] = RowwiseParallel(output_layouts=Shard(-1))
        if fault == "missing" and dist.get_rank() == 1:
            del plan["down"]
        self.model = parallelize_module(full, mesh, plan)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        return self.model(self.before(x))  # collective


def functional(ctx: TargetContext) -> tpcompile.Target:
    """A model with functional collectives."""
    model = _functional(ctx)
    return _target(model, resized=None if model.fault else _inputs(6))


def planned(ctx: TargetContext) -> tpcompile.Target:
    """A model under a plan."""
    return _target(Planned(Full(), ctx.mesh["tp"], ctx.settings.get("fault", "")), resized=None)


class Averaged(Functional):
    """The MLP in shards, some times over, then averaged over the data-parallel ranks."""

    dp: dist.ProcessGroup
    depth = 1

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        for _ in range(self.depth):
            x = super().forward(x)
        return funcol.all_reduce(x, "sum", self.dp) / self.dp.size()


def two_axes(ctx: TargetContext) -> tpcompile.Target:
    """Groups of one axis of a mesh of the target's own.

    `--set fault=group` makes a rank of the last group different, `--set fault=depth` that whole group.
    """
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Averaged(Full(), mesh.get_group("tp"))
    model.dp, fault = mesh.get_group("dp"), ctx.settings.get("fault")
    if mesh.get_local_rank("dp") == 1:
        model.fault = "constant" if fault == "group" else ""
        model.depth = 2 if fault == "depth" else 1
    return tpcompile.Target(program=model, inputs=_inputs(4), mesh=mesh)


def own_axis(ctx: TargetContext) -> tpcompile.Target:
    """All ranks in one axis that has a different name; torch takes the default group for it, as for `ctx.mesh`."""
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("model",))
    model = Functional(Full(), mesh.get_group("model"))
    return tpcompile.Target(program=model, inputs=_inputs(4), mesh=mesh, axis="model")


def trained(ctx: TargetContext) -> tpcompile.Target:
    """A train step whose loss and gradient are compared with those of one device."""
    model = Trained(Full(), ctx.mesh.get_group("tp"))
    model.fault = ctx.settings.get("fault", "")
    return tpcompile.Target(program=model, inputs=_inputs(4), step=_step, reference=Full())


def accumulated(ctx: TargetContext) -> tpcompile.Target:
    """The same, with the gradient that the input has after a step."""
    model = Trained(Full(), ctx.mesh.get_group("tp"))
    model.fault = ctx.settings.get("fault", "")
    (x,) = _inputs(4)
    return tpcompile.Target(program=model, inputs=(x.requires_grad_(),), step=_accumulate, reference=Full())


class Blocks(nn.Module):
    """Three of the MLP, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Functional(Full(), group) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        for block in self.blocks:
            x = block(x)
        return x


def per_block(ctx: TargetContext) -> tpcompile.Target:
    """A model that compiles its blocks; `--set fault=uncompiled` leaves the last out on rank 1."""
    model = Blocks(ctx.mesh.get_group("tp"))
    is_whole = ctx.rank != 1 or ctx.settings.get("fault") != "uncompiled"
    for block in model.blocks if is_whole else model.blocks[:-1]:
        block.compile(backend="aot_eager")
    return tpcompile.Target(program=model, inputs=_inputs(4), num_graphs=None, is_compiled=True)


def pair(ctx: TargetContext) -> tuple[Any, Any]:
    """A program and its inputs."""
    return _functional(ctx), {"x": _inputs(4)[0]}


def reading_rank(ctx: TargetContext) -> tpcompile.Target:
    """A constant that depends on the rank, declared as intended."""
    model = _functional(ctx, fault="constant")
    allowed = [("graph", "mul(%0, ", "each rank scales its own input, on purpose")]
    return tpcompile.Target(program=model, inputs=_inputs(4), allow=allowed)


def ending(ctx: TargetContext) -> Any:
    """What a target can do instead of being one."""
    how = ctx.settings["how"]
    if how == "raises on one" and ctx.rank == 1:
        raise ValueError("no such checkpoint")
    if how == "raises":
        raise ValueError("no such checkpoint")
    if how == "killed on 0" and ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "returns nothing":
        return None
    if how == "has no such axis":
        return tpcompile.Target(program=_functional(ctx), inputs=_inputs(4), axis="model")
    if how == "allows what cannot be":
        return tpcompile.Target(
            program=_functional(ctx), inputs=_inputs(4), allow=[("graphs", "mul(%0, ", "on purpose")]
        )
    if how == "never returns":
        time.sleep(1000)
    if how == "never ends":
        return tpcompile.Target(program=_sleep, inputs=_inputs(4), is_compiled=True)
    if how == "compiles nothing":
        return tpcompile.Target(program=Full(), inputs=_inputs(4), is_compiled=True)
    if how == "NaN":
        model, (x,) = _functional(ctx), _inputs(4)
        return tpcompile.Target(program=model, inputs=(x * float("nan"),), reference=Full())
    return _functional(ctx), _inputs(4)


def _functional(ctx: TargetContext, fault: str = "") -> Functional:
    model = Functional(Full(), ctx.mesh.get_group("tp"))
    model.fault = fault or ctx.settings.get("fault", "")
    return model


def _target(model: nn.Module, resized: tuple[Tensor] | None) -> tpcompile.Target:
    return tpcompile.Target(program=model, inputs=_inputs(8), resized=resized, reference=Full())


def _inputs(tokens: int) -> tuple[Tensor]:
    return (torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1)),)


def _step(program: Any, inputs: tuple[Tensor]) -> dict[str, Tensor]:
    (x,) = inputs
    x = x.detach().requires_grad_()
    loss = program(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x)
    return {"loss": loss, "gradient": gradient}


def _accumulate(program: Any, inputs: tuple[Tensor]) -> tuple[Tensor, Tensor | None]:
    """A step that never sets the gradient to None: it adds to that of the step before."""
    (x,) = inputs
    y = program(x)
    y.square().mean().backward()
    return y, x.grad


def _sleep(x: Tensor) -> Tensor:
    time.sleep(1000)
    return x
