"""One rank is fed differently: layout, size, dtype, gradient and inference modes, tensor classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.faults.context import Context

# B batch, D features; all tensors are plain local ones.


def _block(context: Context, **options: Any) -> Callable[[Tensor], Tensor]:
    w1_DD, w2_DD = context.randn(16, 16), context.randn(16, 16)

    def block(x_BD: Tensor) -> Tensor:  # blamed: input of the block
        y_BD = (x_BD @ w1_DD).relu() @ w2_DD
        return funcol.all_reduce(y_BD, "sum", context.group) + 1  # partial -> replicated

    return torch.compile(block, backend=context.backend, **options)


def _batches(context: Context) -> Iterator[tuple[int, Tensor]]:
    for step in range(context.num_steps):
        yield step, context.randn(8, 16)


def shape(context: Context) -> None:
    """The last batch of a data loader is shorter on one rank."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        block(x_BD[:4] if context.faulty(step) else x_BD)


def stride(context: Context) -> None:
    """The same numbers in another memory layout."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        block(x_BD.t().contiguous().t() if context.faulty(step) else x_BD)


def dtype(context: Context) -> None:
    """A batch that was not cast."""
    w_DD = context.randn(16, 16)

    def block(x_BD: Tensor) -> Tensor:  # fault: dtype
        y_BD = x_BD.float() @ w_DD
        return funcol.all_reduce(y_BD, "sum", context.group)

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step, x_BD in _batches(context):
        compiled(x_BD.to(torch.bfloat16) if context.faulty(step) else x_BD)


def requires_grad(context: Context) -> None:
    """An activation that is not detached."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        block(x_BD.requires_grad_() if context.faulty(step) else x_BD)


def no_grad(context: Context) -> None:
    """One rank evaluates under no_grad, the others do not."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        with torch.no_grad() if context.faulty(step) else nullcontext():
            block(x_BD)


def inference_tensor(context: Context) -> None:
    """A tensor made under inference mode has other dispatch keys."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        with torch.inference_mode(context.faulty(step)):
            fed_BD = x_BD + 1
        with torch.no_grad():
            block(fed_BD)


def inference_tensor_at_first(context: Context) -> None:
    """A weight loaded under inference mode on one rank, before the first compile."""
    with torch.inference_mode(context.faulty(0)):
        w_DD = context.randn(16, 16) * 1.0

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD  # fault: inference weight
        return funcol.all_reduce(y_BD, "sum", context.group)

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    with torch.no_grad():
        for _, x_BD in _batches(context):
            compiled(x_BD)


def async_tensor(context: Context) -> None:
    """One rank passes the result of an eager collective on before it has waited for it."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        summed_BD = funcol.all_reduce(x_BD, "sum", context.group)  # replicated
        block(summed_BD if context.faulty(step) else funcol.wait_tensor(summed_BD))


def tensor_or_number(context: Context) -> None:
    """A scale that is a tensor on one rank and a Python number on the other."""
    w_DD = context.randn(16, 16)

    def block(x_BD: Tensor, scale: Tensor | float) -> Tensor:  # fault: tensor or number
        y_BD = x_BD @ w_DD * scale  # fault: tensor or number
        return funcol.all_reduce(y_BD, "sum", context.group)

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step, x_BD in _batches(context):
        compiled(x_BD, 0.5 if context.faulty(step) else torch.tensor(0.5, device=context.device))


def automatic_dynamic(context: Context) -> None:
    """Sizes 8, 8, 9 on one rank and 8, 8, 8 on the other: only one makes the size dynamic."""
    block = _block(context)
    for step in range(context.num_steps):
        block(context.randn(9 if context.faulty(step) else 8, 16))


def split_sizes(context: Context) -> None:
    """Tokens of the experts: one rank sends sizes that it did not agree on with the others."""

    def exchange(x_BD: Tensor, sizes: list[int]) -> Tensor:  # fault: split sizes
        return funcol.all_to_all_single(x_BD, sizes, sizes, context.group) * 2  # fault: split sizes

    compiled = torch.compile(exchange, backend=context.backend, dynamic=False)
    for step, x_BD in _batches(context):
        compiled(x_BD, [6, 2] if context.faulty(step) else [4, 4])
