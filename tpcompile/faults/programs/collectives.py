"""One rank issues other collectives: more, fewer, in another order, of another kind, on another group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.faults.context import Context

# B batch, D features; all tensors are plain local ones.


def _run(context: Context, block: Callable[[Tensor], Any]) -> None:
    """First compile at step 0, where the fault is."""
    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16))


def extra_on_recompile(context: Context) -> None:
    """A shorter batch on one rank: it recompiles, and the new code has one more collective."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:  # fault: recompile with a collective
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if x_BD.shape[0] != 8:
            y_BD = funcol.all_reduce(y_BD * 0.5, "sum", group)
        return y_BD + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        compiled(context.randn(4 if context.faulty(step) else 8, 16))


def extra_at_first(context: Context) -> None:
    """One rank reduces its loss for logging."""
    w_DD, group, logs = context.randn(16, 16), context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if logs:
            y_BD = y_BD + funcol.all_reduce(y_BD.mean(), "sum", group)  # fault: extra collective
        return y_BD + 1

    _run(context, block)


def missing(context: Context) -> None:
    """One rank has nothing to send and leaves the collective out."""
    w_DD, group, idle = context.randn(16, 16), context.group, context.diverges

    def block(x_BD: Tensor) -> tuple[Tensor, Tensor]:
        y_BD = x_BD @ w_DD
        if not idle:
            y_BD = funcol.all_reduce(y_BD, "sum", group)  # fault: missing collective
        z_B = funcol.all_reduce(x_BD.sum(1), "sum", group)
        return y_BD, z_B

    _run(context, block)


def reduce_op(context: Context) -> None:
    """Maximum instead of sum."""
    w_DD, group, op = context.randn(16, 16), context.group, "max" if context.diverges else "sum"

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, op, group) + 1  # fault: reduce op

    _run(context, block)


def wrong_group(context: Context) -> None:
    """The collective of one rank goes to a group of other ranks: it must be caught before it is issued."""
    w_DD = context.randn(16, 16)
    alone = [dist.new_group([rank], group_desc="alone") for rank in range(context.world_size)]
    group = alone[context.rank] if context.diverges else context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1  # fault: group

    _run(context, block)


def order_forward(context: Context) -> None:
    """An all-reduce and an all-gather in opposite order."""
    group, swapped = context.group, context.diverges

    def block(x_BD: Tensor) -> tuple[Tensor, Tensor]:
        if swapped:
            gathered = funcol.all_gather_tensor(x_BD * 2, 0, group)  # fault: order in the forward
            reduced = funcol.all_reduce(x_BD + 1, "sum", group)
            return reduced, gathered
        reduced = funcol.all_reduce(x_BD + 1, "sum", group)
        gathered = funcol.all_gather_tensor(x_BD * 2, 0, group)
        return reduced, gathered

    _run(context, block)


def order_two_groups(context: Context) -> None:
    """Two groups of the same ranks, used in opposite order: a circular wait."""
    first, second = context.group, dist.new_group(list(range(context.world_size)), group_desc="experts")
    if context.diverges:
        first, second = second, first

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD + 1, "sum", first)  # fault: order of groups
        return funcol.all_reduce(y_BD * 2, "sum", second)

    _run(context, block)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, group_name: str, op: str) -> Tensor:
        """Identity; the gradient is reduced."""
        ctx.group_name, ctx.op = group_name, op
        return x_BD * 1.0

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor, None, None]:
        """Reduce the gradient over the ranks."""
        reduced = torch.ops._c10d_functional.all_reduce(grad_BD, ctx.op, ctx.group_name)  # fault: order in the backward
        return torch.ops._c10d_functional.wait_tensor(reduced), None, None


def order_backward(context: Context) -> None:
    """The forward has no collective; the backward reduces two gradients, in opposite order on one rank."""
    name, swapped = context.group.group_name, context.diverges

    def block(x_BD: Tensor, y_BD: Tensor) -> Tensor:
        if swapped:
            b_BD = _SumGradient.apply(y_BD.tanh(), name, "avg")
            a_BD = _SumGradient.apply(x_BD.sin(), name, "sum")
        else:
            a_BD = _SumGradient.apply(x_BD.sin(), name, "sum")
            b_BD = _SumGradient.apply(y_BD.tanh(), name, "avg")
        return a_BD * b_BD

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        x_BD, y_BD = context.randn(8, 16, requires_grad=True), context.randn(8, 16, requires_grad=True)
        compiled(x_BD, y_BD).sum().backward()


def sizes(context: Context) -> None:
    """One rank gathers a tensor of another size."""
    group, kept = context.group, 4 if context.diverges else 8

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD[:, :kept] * 2, "sum", group)  # fault: sizes

    _run(context, block)


def collective_dtype(context: Context) -> None:
    """One rank reduces in bfloat16, the other in float32."""
    group, dtype = context.group, torch.bfloat16 if context.diverges else torch.float32

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD.to(dtype), "sum", group).float()  # fault: dtype of a collective

    _run(context, block)


def unwaited(context: Context) -> None:
    """One rank reads a collective's result before it is there."""
    name, waits = context.group.group_name, not context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = torch.ops._c10d_functional.all_reduce(x_BD * 2, "sum", name)  # fault: unwaited
        if waits:
            y_BD = torch.ops._c10d_functional.wait_tensor(y_BD)
        return y_BD + 1

    _run(context, block)


def dropped_result(context: Context) -> None:
    """One rank takes an out-of-place reduce for an in-place one and drops the result."""
    group, drops = context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD * 2
        if drops:
            funcol.all_reduce(y_BD, "sum", group)  # fault: dropped result
        else:
            y_BD = funcol.all_reduce(y_BD, "sum", group)
        return y_BD + 1

    _run(context, block)


def local_flag(context: Context) -> None:
    """A collective in eager code between compiled steps, under a flag that is local to a rank."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        ongoing = [] if not context.faulty(step) else ["request"]
        if ongoing:
            dist.all_reduce(torch.ones(3, device=context.device), group=group)  # fault: local flag
        compiled(context.randn(8, 16))
