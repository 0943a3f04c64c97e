"""One rank issues different collectives: more, fewer, in a different order, of a different kind or group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.faults.case import fault
from tests.faults.context import Context
from tpcompile.evidence.records.causes import Cause

# B batch, D features; all tensors are plain local ones.

_LOCAL = "sglang#26921, sglang#26923: TP=8 hangs after hours, a collective under local state"
_REORDERS = "pytorch#150074: a pass moves waits and so reorders collectives"
_SOURCES = "torchrec#4601: a rank within the group is passed as the source of a broadcast, which is a global rank"
_UNWAITED = "torchtitan#1769: 495 unwaited collective calls"


@fault(
    Cause.SHAPE,
    "pytorch#155558: compiler collectives deadlock when one rank recompiles",
    marker="# fault: recompile with a collective",
    step=3,
)
def extracoll(context: Context) -> None:
    """Rank 1 recompiles for a different shape at step 3, and the new code has one more all-reduce."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:  # fault: recompile with a collective
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if x_BD.shape[0] != 8:
            y_BD = funcol.all_reduce(y_BD * 0.5, "sum", group)
        return y_BD + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        compiled(context.randn(4 if context.faulty(step) else 8, 16))


@fault(Cause.EXTRA_COLLECTIVE, _LOCAL, marker="# fault: extra collective")
def extra_collective(context: Context) -> None:
    """Rank 1 has one more all-reduce, from the beginning."""
    w_DD, group, logs = context.randn(16, 16), context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD @ w_DD, "sum", group)
        if logs:
            y_BD = y_BD + funcol.all_reduce(y_BD.mean(), "sum", group)  # fault: extra collective
        return y_BD + 1

    context.run(block)


@fault(Cause.EXTRA_COLLECTIVE, _LOCAL, marker="# fault: missing collective")
def missing_collective(context: Context) -> None:
    """Rank 1 leaves out an all-reduce, from the beginning."""
    w_DD, group, idle = context.randn(16, 16), context.group, context.diverges

    def block(x_BD: Tensor) -> tuple[Tensor, Tensor]:
        y_BD = x_BD @ w_DD
        if not idle:
            y_BD = funcol.all_reduce(y_BD, "sum", group)  # fault: missing collective
        z_B = funcol.all_reduce(x_BD.sum(1), "sum", group)
        return y_BD, z_B

    context.run(block)


@fault(Cause.REDUCE_OP, "optimum-habana#1174: wrong numbers from a compiled all-reduce", marker="# fault: reduce op")
def reduce_op(context: Context) -> None:
    """Rank 1 reduces with max, rank 0 with sum."""
    w_DD, group, op = context.randn(16, 16), context.group, "max" if context.diverges else "sum"

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, op, group) + 1  # fault: reduce op

    context.run(block)


@fault(Cause.BROADCAST_SOURCE, _SOURCES, marker="# fault: broadcast source")
def broadcast_source(context: Context) -> None:
    """Rank 1 broadcasts from itself, rank 0 from rank 0."""
    w_DD, group, src = context.randn(16, 16), context.group, context.rank if context.diverges else 0

    def block(x_BD: Tensor) -> Tensor:
        return funcol.broadcast(x_BD @ w_DD, src, group) + 1  # fault: broadcast source

    context.run(block)


@fault(Cause.GROUP, "torchtitan#3493: process group 20 cannot be resolved under compile", marker="# fault: group")
def group(context: Context) -> None:
    """Rank 1 reduces over a group of its own."""
    w_DD = context.randn(16, 16)
    alone = [dist.new_group([rank], group_desc="alone") for rank in range(context.world_size)]
    group = alone[context.rank] if context.diverges else context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1  # fault: group

    context.run(block)


@fault(Cause.ORDER_FORWARD, _REORDERS, marker="# fault: order in the forward")
def order_forward(context: Context) -> None:
    """Rank 1 gathers before it reduces."""
    group, swapped = context.group, context.diverges

    def block(x_BD: Tensor) -> tuple[Tensor, Tensor]:
        if swapped:
            gathered = funcol.all_gather_tensor(x_BD * 2, 0, group)  # fault: order in the forward
            reduced = funcol.all_reduce(x_BD + 1, "sum", group)
            return reduced, gathered
        reduced = funcol.all_reduce(x_BD + 1, "sum", group)
        gathered = funcol.all_gather_tensor(x_BD * 2, 0, group)
        return reduced, gathered

    context.run(block)


@fault(
    Cause.ORDER_FORWARD,
    "torchrec#4149: 64 ranks deadlock, circular wait across two groups",
    marker="# fault: order of groups",
)
def order_two_groups(context: Context) -> None:
    """Rank 1 uses two groups of the same ranks in opposite order."""
    first, second = context.group, dist.new_group(list(range(context.world_size)), group_desc="experts")
    if context.diverges:
        first, second = second, first

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_reduce(x_BD + 1, "sum", first)  # fault: order of groups
        return funcol.all_reduce(y_BD * 2, "sum", second)

    context.run(block)


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


@fault(Cause.ORDER_BACKWARD, _REORDERS, marker="# fault: order in the backward")
def order_backward(context: Context) -> None:
    """Rank 1 reduces two gradients in opposite order."""
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


@fault(
    Cause.PYTHON_VALUE, "torchtitan#1649, torchtitan#1640: some ranks hang while compiling MoE", marker="# fault: sizes"
)
def collective_sizes(context: Context) -> None:
    """Rank 1 reduces a tensor of half the size, from a Python number that Dynamo guards."""
    group, kept = context.group, 4 if context.diverges else 8

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD[:, :kept] * 2, "sum", group)  # fault: sizes

    context.run(block)


@fault(
    Cause.PYTHON_VALUE,
    "unslothai/unsloth-zoo#967: after a desync a collective returned garbage",
    marker="# fault: dtype of a collective",
)
def collective_dtype(context: Context) -> None:
    """Rank 1 reduces in bfloat16, rank 0 in float32, from a dtype that Dynamo guards."""
    group, dtype = context.group, torch.bfloat16 if context.diverges else torch.float32

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD.to(dtype), "sum", group).float()  # fault: dtype of a collective

    context.run(block)


@fault(Cause.UNWAITED, _UNWAITED, "pytorch#180614: a missing wait, wrong values", marker="# fault: unwaited")
def unwaited(context: Context) -> None:
    """Rank 1 reads the result of an all-reduce without waiting for it."""
    name, waits = context.group.group_name, not context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = torch.ops._c10d_functional.all_reduce(x_BD * 2, "sum", name)  # fault: unwaited
        if waits:
            y_BD = torch.ops._c10d_functional.wait_tensor(y_BD)
        return y_BD + 1

    context.run(block)


@fault(Cause.UNUSED_RESULT, _UNWAITED, marker="# fault: dropped result")
def dropped_result(context: Context) -> None:
    """Rank 1 drops the result of an all-reduce."""
    group, drops = context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD * 2
        if drops:
            funcol.all_reduce(y_BD, "sum", group)  # fault: dropped result
        else:
            y_BD = funcol.all_reduce(y_BD, "sum", group)
        return y_BD + 1

    context.run(block)


@fault(Cause.STUCK_COLLECTIVE, _LOCAL, marker="# fault: local flag", step=2)
def local_flag(context: Context) -> None:
    """Rank 1 issues an eager all-reduce between two steps, at step 2."""
    w_DD = context.randn(16, 16)
    group = context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        ongoing = [] if not context.faulty(step) else ["request"]
        if ongoing:
            dist.all_reduce(torch.ones(3, device=context.device), group=group)  # fault: local flag
        compiled(context.randn(8, 16))
