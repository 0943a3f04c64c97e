"""One autograd.Function per collective: its forward and its stated backward, each traced or eager inside `issue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpcompile.collectives.issue import (
    Sizes,
    issue_all_gather,
    issue_all_reduce,
    issue_all_to_all,
    issue_broadcast,
    issue_reduce_scatter,
    own_shard,
    zeros_around,
)
from tpcompile.errors import TpCompileError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Allow create_graph=True, and raise when the gradient is differentiated: a second order is not defined."""

    def once(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found, *rest = backward(ctx, *grads)
        for grad in grads:
            if grad is not None and grad.requires_grad:
                found = _Refuse.apply(grad, found)
                break
        return found, *rest

    return once


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, found: Tensor) -> Tensor:
        return found.detach().view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TpCompileError(
            "a collective of tpcompile was differentiated twice; only first-order gradients are defined. Leave out "
            "create_graph=True, or detach the first gradient"
        )


class AllReduce(torch.autograd.Function):
    """Sum or average; backward identity (I) or all-reduce (R), divided by the group size for the average."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dst: str, op: str) -> Tensor:
        ctx.group, ctx.dst, ctx.op = group, dst, op
        return issue_all_reduce(x, op, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.dst == "R":
            return issue_all_reduce(grad, ctx.op, ctx.group), None, None, None
        return grad / ctx.group.size() if ctx.op == "avg" else grad, None, None, None


class AllReduceExtremum(torch.autograd.Function):
    """Maximum or minimum; its gradient goes to the ranks that hold it, split evenly among ties as torch.amax."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dst: str, op: str) -> Tensor:
        ctx.group, ctx.dst = group, dst
        y = issue_all_reduce(x, op, group)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Same shape; an all-reduce of the ties, and for R one of the gradient."""
        x, y = ctx.saved_tensors
        is_held = x == y
        ties = issue_all_reduce(is_held.to(grad.dtype), "sum", ctx.group)
        if ctx.dst == "R":
            # Not packed with the ties: see repro/inductor_all_reduce_of_cat.py.
            grad = issue_all_reduce(grad, "sum", ctx.group)
        return torch.where(is_held, grad, torch.zeros_like(grad)) / ties, None, None, None


class CopyToTp(torch.autograd.Function):
    """Identity; backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_reduce(grad, "sum", ctx.group), None


class AllGather(torch.autograd.Function):
    """All-gather; backward reduce-scatter (R), or this rank's shard of the gradient (I: `own` is given)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor | None, dim: int, group: Any, sizes: Sizes) -> Tensor:
        """Size n of `dim` becomes the sum over ranks."""
        ctx.dim, ctx.group, ctx.sizes, ctx.keeps_shard = dim, group, sizes, own is not None
        if own is not None:
            ctx.save_for_backward(own)
        return issue_all_gather(x, dim, group, sizes)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.keeps_shard:
            return issue_reduce_scatter(grad, ctx.dim, ctx.group, ctx.sizes), None, None, None, None
        if ctx.sizes is not None:  # rank-dependent: uneven shards are
            return grad.split(ctx.sizes, ctx.dim)[ctx.group.rank()].contiguous(), None, None, None, None
        (own,) = ctx.saved_tensors
        return own_shard(grad, own, ctx.dim, ctx.group.size()), None, None, None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, sizes: Sizes) -> Tensor:
        """`dim` becomes this rank's part."""
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        return issue_reduce_scatter(x, dim, group, sizes)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_gather(grad, ctx.dim, ctx.group, ctx.sizes), None, None, None


class AllToAll(torch.autograd.Function):
    """All-to-all; backward is the all-to-all with input and output splits exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, receive: Any, send: Any, group: Any) -> Tensor:
        """`dim` becomes sum(receive)."""
        ctx.dim, ctx.receive, ctx.send, ctx.group = dim, receive, send, group
        return issue_all_to_all(x, dim, receive, send, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_to_all(grad, ctx.dim, ctx.send, ctx.receive, ctx.group), None, None, None, None


class Broadcast(torch.autograd.Function):
    """Broadcast; backward keeps the gradient (I) or the sum of gradients (R) on the source rank, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, src: int, group: Any, dst: str) -> Tensor:
        ctx.src, ctx.group, ctx.dst = src, group, dst
        ctx.save_for_backward(own)
        return issue_broadcast(x, src, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        (own,) = ctx.saved_tensors
        if ctx.dst == "R":
            grad = issue_all_reduce(grad, "sum", ctx.group)
        # where, not a product: 0 * inf would put NaN on the ranks that hold no part of the result.
        return torch.where((own == ctx.src).squeeze(0), grad, torch.zeros_like(grad)), None, None, None, None


class Scatter(torch.autograd.Function):
    """This rank's part of a replicated tensor; backward all-gather (I) or zeros around the own part (R)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, dim: int, group: Any, src: str) -> Tensor:
        """`dim` becomes 1 / group size of it."""
        ctx.dim, ctx.group, ctx.src = dim, group, src
        ctx.save_for_backward(own)
        return own_shard(x, own, dim, group.size())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.src == "I":
            return issue_all_gather(grad, ctx.dim, ctx.group), None, None, None, None
        (own,) = ctx.saved_tensors
        return zeros_around(grad, own, ctx.dim, ctx.group.size()), None, None, None, None
