"""One rank has a different Python value: guarded, or folded by Dynamo without a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.case import fault
from tests.faults.context import Context
from tpcompile.evidence.records.causes import Cause

# B batch, D features; all tensors are plain local ones.

_ATTRIBUTE = "# blamed: attribute of the block"
_SCALE = "optimum-habana#1174: wrong numbers from a compiled all-reduce"
_FOLDS = "pytorch#109029: get_rank() folds with no guard"
_RECOMPILES = "pytorch#155558: compiler collectives deadlock when one rank recompiles"

SCALE = 1.0


class Block(nn.Module):
    """A row-parallel linear layer, and a number that its forward reads."""

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


@fault(Cause.PYTHON_VALUE, _RECOMPILES, marker=_ATTRIBUTE, step=2)
def attribute(context: Context) -> None:
    """An attribute of the module changes on rank 1 at step 2."""
    block = Block(context)
    compiled = _compile(context, block)
    for step in range(context.num_steps):
        if context.faulty(step):
            block.scale = 0.75
        compiled(context.randn(8, 16))


@fault(Cause.PYTHON_VALUE, _SCALE, "Megatron-LM#1754: loss of tensor parallelism off by 50%", marker=_ATTRIBUTE)
def attribute_constant(context: Context) -> None:
    """An attribute of the module has a different value on rank 1 from the beginning."""
    block = Block(context)
    if context.faulty(0):
        block.scale = 0.75
    context.run(block)


@fault(Cause.PYTHON_VALUE, _RECOMPILES, name="global", marker="# fault: global", step=2)
def module_global(context: Context) -> None:
    """A global changes on rank 1 at step 2."""
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


@fault(Cause.PYTHON_VALUE, _RECOMPILES, marker="# fault: closure", step=2)
def closure(context: Context) -> None:
    """A closure cell is rebound on rank 1 at step 2."""
    w_DD, group, scale = context.randn(16, 16), context.group, 1.0

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD * scale  # fault: closure
        return funcol.all_reduce(y_BD, "sum", group)

    compiled = _compile(context, block)
    for step in range(context.num_steps):
        if context.faulty(step):
            scale = 2.0
        compiled(context.randn(8, 16))


@fault(Cause.RANK_BRANCH, _FOLDS, marker="# fault: guarded branch")
def branch(context: Context) -> None:
    """`if rank == 1`, where `rank` is a captured number, from the beginning."""
    w_DD, group, rank = context.randn(16, 16), context.group, context.rank

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if rank == 1:  # fault: guarded branch
            y_BD = y_BD.clamp(-1, 1)  # fault: guarded branch
        return y_BD + 1

    context.run(block)


@fault(Cause.RANK_BRANCH, _FOLDS, "pytorch#185418: get_rank as a SymInt", marker="# fault: get_rank branch")
def getrank_branch(context: Context) -> None:
    """`if dist.get_rank() == 1` in the region, from the beginning; no guard holds it."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if dist.get_rank() == 1:
            y_BD = y_BD.clamp(-1, 1)  # fault: get_rank branch
        return y_BD + 1

    context.run(block)


@fault(
    Cause.RANK_CONSTANT,
    _FOLDS,
    "pytorch#188332: bucketed all-gather bakes the rank's offset into cached code",
    marker="# fault: get_rank constant",
)
def getrank_constant(context: Context) -> None:
    """A factor is computed from `dist.get_rank()`, from the beginning; no guard holds it."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD * (1 + dist.get_rank())  # fault: get_rank constant
        return funcol.all_reduce(y_BD, "sum", group)

    context.run(block)


@fault(Cause.PYTHON_VALUE, "pytorch#177960: spmd_check hashes ops and shapes, not edges", marker="# fault: edges")
def edges(context: Context) -> None:
    """Rank 1 swaps the operands of a subtraction."""
    w_DD, group, swapped = context.randn(16, 16), context.group, context.faulty(0)

    def block(x_BD: Tensor) -> Tensor:
        a_BD = x_BD @ w_DD
        b_BD = x_BD + 1
        left, right = (b_BD, a_BD) if swapped else (a_BD, b_BD)  # fault: edges
        y_BD = left.sub(right)  # fault: edges
        return funcol.all_reduce(y_BD, "sum", group)

    context.run(block)


@fault(Cause.GUARD_ONLY, "pytorch#114015: asks for a guard diff", marker="# fault: guard only")
def guard_only(context: Context) -> None:
    """A number that the region only compares is 200 on rank 1 and 100 on rank 0; the graphs are equal."""
    w_DD, group, limit = context.randn(16, 16), context.group, [100]
    if context.faulty(0):
        limit[0] = 200

    def block(x_BD: Tensor) -> Tensor:
        if limit[0] > 50:  # fault: guard only
            x_BD = x_BD * 2
        return funcol.all_reduce(x_BD @ w_DD, "sum", group)

    context.run(block)


@fault(
    Cause.RANK_BRANCH, "pytorch#75373: asks to validate the execution order of ranks", marker="# fault: module order"
)
def module_order(context: Context) -> None:
    """Rank 1 runs two layers in opposite order."""
    first, second = nn.Linear(16, 16), nn.ReLU()
    stack = nn.Sequential(second, first) if context.faulty(0) else nn.Sequential(first, second)
    group = context.group

    def block(x_BD: Tensor) -> Tensor:  # fault: module order
        y_BD = stack(x_BD)  # fault: module order
        return funcol.all_reduce(y_BD, "sum", group)

    stack.to(context.device).requires_grad_(False)
    context.run(block)


@fault(
    Cause.RECOMPILE_LIMIT,
    "torchtitan#471: async TP silently off, cache limit reached",
    "allenai/OLMo-core#778: a helper specialises per block, then falls to eager",
    marker="# fault: recompile limit",
    step=3,
)
def recompile_limit(context: Context) -> None:
    """Rank 1 exceeds the recompile limit at step 3 and runs eager from there on."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor, count: int) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD * count, "sum", group)  # fault: recompile limit

    torch._dynamo.config.recompile_limit = 2
    compiled = _compile(context, block)
    for step in range(context.num_steps):
        # All ranks count up to the limit; rank 1 then exceeds it.
        count = min(step, 1)
        if context.faulty(step):
            count = 7
        compiled(context.randn(8, 16), count)
