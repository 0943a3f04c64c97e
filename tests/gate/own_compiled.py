"""Programs that are right in eager, for `--target tests.gate.own_compiled:NAME`.

`--set wrong=yes` adds a fault to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import tpcompile
from tests.gate import own_compilers
from tpcompile.collectives.strategies import Collectives
from tpcompile.target import TargetContext

WIDTH, HIDDEN = 16, 32


class Sharded(nn.Module):
    """An MLP, its weights plain shards of this rank."""

    def __init__(self, comm: Collectives, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(HIDDEN, WIDTH) / 4, torch.randn(WIDTH, HIDDEN) / 4
        self.comm = comm
        self.up = nn.Parameter(up.chunk(comm.size)[comm.rank].clone().to(dtype))
        self.down = nn.Parameter(down.chunk(comm.size, 1)[comm.rank].clone().to(dtype))

    def act(self, h: Tensor) -> Tensor:
        """The activation, which the compiler gets wrong."""
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h = self.act(F.linear(self.comm.copy_to_tp(x), self.up))
        return x + self.comm.all_reduce(F.linear(h, self.down))


class Tanh(Sharded):
    def act(self, h: Tensor) -> Tensor:
        return torch.tanh(h) * h  # post_grad


class Relu(Sharded):
    def act(self, h: Tensor) -> Tensor:
        return torch.relu(h)  # joint


class Silu(Sharded):
    def act(self, h: Tensor) -> Tensor:
        return F.silu(h)  # decomposition


class Sin(Sharded):
    def act(self, h: Tensor) -> Tensor:
        return torch.sin(h) + h  # lowering


class InPlace(Sharded):
    def act(self, h: Tensor) -> Tensor:
        h = h * 2
        h.clamp_(max=1.0)  # backend
        return h


class Branch(Sharded):
    """What was meant for the compiler only is another function."""

    def act(self, h: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return h * torch.sigmoid(h)  # traced
        return torch.tanh(h)


class Skip(Sharded):
    def act(self, h: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            h = torch.tanh(h)  # skipped
        return h * 2


class Dropout(Sharded):
    """Before the layer is cut, so that all ranks and the reference have one mask."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return super().forward(F.dropout(x, 0.5))


def _made(
    ctx: TargetContext, module: type[Sharded], fault: str, dtype: torch.dtype = torch.float32
) -> tpcompile.Target:
    only = ctx.settings.get("only_rank")
    is_here = only is None or int(only) == ctx.rank
    if ctx.settings.get("wrong") and is_here:
        own_compilers.put_in(fault)
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    comm = Collectives(ctx.mesh.get_group("tp"))
    return tpcompile.Target(
        program=module(comm, dtype), inputs=(x,), reference=module(Collectives(None), dtype),
        tp_aware=own_compilers.NAMES,
    )  # fmt: skip


def post_grad(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Tanh, "post_grad")


def joint(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Relu, "joint")


def decomposition(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Silu, "decomposition")


def lowering(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Sin, "lowering")


def backend(ctx: TargetContext) -> tpcompile.Target:
    target = _made(ctx, InPlace, "backend")
    used = own_compilers.without_in_place if ctx.settings.get("wrong") else "inductor"
    return replace(target, program=torch.compile(target.program, backend=used), is_compiled=True)


def dropout(ctx: TargetContext) -> tpcompile.Target:
    """Each call begins with one seed; compiled code has random numbers of its own."""

    def step(program: Callable[[Tensor], Tensor], inputs: tuple[Tensor]) -> Tensor:
        torch.manual_seed(0)
        return program(*inputs)

    return replace(_made(ctx, Dropout, ""), step=step)


def bf16(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Silu, "", torch.bfloat16)


def branch(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Branch, "")


def skip(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Skip, "")


def without_collectives(graph: torch.fx.GraphModule, _inputs: object) -> Any:
    """Leaves the sums to someone else."""
    for node in list(graph.graph.nodes):
        if "all_reduce" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return make_boxed_func(graph.forward)


backend_of_others = aot_autograd(fw_compiler=without_collectives)


def sums(ctx: TargetContext) -> tpcompile.Target:
    target = _made(ctx, Tanh, "")
    program = torch.compile(target.program, backend=backend_of_others)
    names = (f"{__name__}.backend_of_others", f"{__name__}.without_collectives")
    return replace(target, program=program, is_compiled=True, tp_aware=names)
