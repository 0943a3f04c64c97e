"""One rank has another Python value: guarded ones, and those that Dynamo folds without a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tpcompile.faults.context import Context

# B batch, D features; all tensors are plain local ones.

SCALE = 1.0


class Block(nn.Module):
    """A linear layer, its reduce and a number."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.weight_DD = nn.Parameter(context.randn(16, 16), requires_grad=False)
        self.group = context.group
        self.scale = 0.5

    def forward(self, x_BD: Tensor) -> Tensor:
        """Scale the local product, then sum over the ranks."""
        y_BD = x_BD @ self.weight_DD * self.scale  # blamed: attribute of the block
        return funcol.all_reduce(y_BD, "sum", self.group)


def _compile(context: Context, program: Any) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(program, backend=context.backend, dynamic=False)
    return compiled


def attribute(context: Context) -> None:
    """A schedule changes an attribute on one rank only."""
    block = Block(context)
    compiled = _compile(context, block)
    for step in range(context.num_steps):
        if context.faulty(step):
            block.scale = 0.75
        compiled(context.randn(8, 16))


def attribute_constant(context: Context) -> None:
    """Another value of an attribute is in the graph from the beginning."""
    block = Block(context)
    if context.faulty(0):
        block.scale = 0.75
    compiled = _compile(context, block)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def module_global(context: Context) -> None:
    """A module's global is changed on one rank."""
    global SCALE
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD * SCALE  # fault: global
        return funcol.all_reduce(y_BD, "sum", group)

    compiled = _compile(context, block)
    for step in range(context.num_steps):
        if context.faulty(step):
            SCALE = 2.0
        compiled(context.randn(8, 16))


def closure(context: Context) -> None:
    """A closure cell is rebound on one rank."""
    w_DD, group, scale = context.randn(16, 16), context.group, 1.0

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD * scale  # fault: closure
        return funcol.all_reduce(y_BD, "sum", group)

    compiled = _compile(context, block)
    for step in range(context.num_steps):
        if context.faulty(step):
            scale = 2.0
        compiled(context.randn(8, 16))


def guarded_branch(context: Context) -> None:
    """`if rank == 1` over an attribute, without a collective behind it."""
    w_DD, group, rank = context.randn(16, 16), context.group, context.rank

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if rank == 1:  # fault: guarded branch
            y_BD = y_BD.clamp(-1, 1)  # fault: guarded branch
        return y_BD + 1

    compiled = _compile(context, block)
    context.faulty(0)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def getrank_branch(context: Context) -> None:
    """`if dist.get_rank() == 1`: Dynamo folds it, with no guard."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if dist.get_rank() == 1:
            y_BD = y_BD.clamp(-1, 1)  # fault: get_rank branch
        return y_BD + 1

    compiled = _compile(context, block)
    context.faulty(0)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def getrank_constant(context: Context) -> None:
    """An offset into the shard, computed from `dist.get_rank()`."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD * (1 + dist.get_rank())  # fault: get_rank constant
        return funcol.all_reduce(y_BD, "sum", group)

    compiled = _compile(context, block)
    context.faulty(0)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def edges(context: Context) -> None:
    """The same ops on other operands."""
    w_DD, group, swapped = context.randn(16, 16), context.group, context.faulty(0)

    def block(x_BD: Tensor) -> Tensor:
        a_BD = x_BD @ w_DD
        b_BD = x_BD + 1
        left, right = (b_BD, a_BD) if swapped else (a_BD, b_BD)  # fault: edges
        y_BD = left.sub(right)  # fault: edges
        return funcol.all_reduce(y_BD, "sum", group)

    compiled = _compile(context, block)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def guard_only(context: Context) -> None:
    """A value that is only checked: equal graphs today, another guard."""
    w_DD, group, limit = context.randn(16, 16), context.group, [100]
    if context.faulty(0):
        limit[0] = 200

    def block(x_BD: Tensor) -> Tensor:
        if limit[0] > 50:  # fault: guard only
            x_BD = x_BD * 2
        return funcol.all_reduce(x_BD @ w_DD, "sum", group)

    compiled = _compile(context, block)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def module_order(context: Context) -> None:
    """Layers of a stack are in another order on one rank."""
    first, second = nn.Linear(16, 16), nn.ReLU()
    stack = nn.Sequential(second, first) if context.faulty(0) else nn.Sequential(first, second)
    group = context.group

    def block(x_BD: Tensor) -> Tensor:  # fault: module order
        y_BD = stack(x_BD)  # fault: module order
        return funcol.all_reduce(y_BD, "sum", group)

    stack.to(context.device).requires_grad_(False)
    compiled = _compile(context, block)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def recompile_limit(context: Context) -> None:
    """A counter that one rank passes as a number: it recompiles until torch gives up on the function."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor, count: int) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD * count, "sum", group)  # fault: recompile limit

    torch._dynamo.config.recompile_limit = 2
    compiled = _compile(context, block)
    for step in range(context.num_steps):
        # All ranks count up to the limit; then one goes on.
        count = min(step, 1)
        if context.faulty(step):
            count = 7
        compiled(context.randn(8, 16), count)
