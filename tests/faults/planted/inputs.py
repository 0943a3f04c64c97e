"""One rank gets a different input: layout, size, dtype, gradient and inference modes, tensor classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.faults.case import fault
from tests.faults.context import Context
from tpcompile.evidence.records.causes import Cause

# B batch, D features; all tensors are plain local ones.

_BLOCK = "# blamed: input of the block"
_RECOMPILES = "pytorch#155558: compiler collectives deadlock when one rank recompiles"


def _block(context: Context, **options: Any) -> Callable[[Tensor], Tensor]:
    w1_DD, w2_DD = context.randn(16, 16), context.randn(16, 16)

    def block(x_BD: Tensor) -> Tensor:  # blamed: input of the block
        y_BD = (x_BD @ w1_DD).relu() @ w2_DD
        return funcol.all_reduce(y_BD, "sum", context.group) + 1  # partial -> replicated

    return torch.compile(block, backend=context.backend, **options)


def _batches(context: Context) -> Iterator[tuple[int, Tensor]]:
    for step in range(context.num_steps):
        yield step, context.randn(8, 16)


@fault(Cause.SHAPE, _RECOMPILES, marker=_BLOCK, step=2)
def shape(context: Context) -> None:
    """Rank 1 gets a batch of 4 instead of 8 at step 2."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        block(x_BD[:4] if context.faulty(step) else x_BD)


@fault(
    Cause.STRIDE,
    "deepspeedai/DeepSpeed#7355: collective stuck, padded inputs of one shape with different strides",
    _RECOMPILES,
    marker=_BLOCK,
    step=2,
)
def stride(context: Context) -> None:
    """Rank 1 gets the same batch in a different memory layout at step 2."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        block(x_BD.t().contiguous().t() if context.faulty(step) else x_BD)


@fault(Cause.DTYPE, _RECOMPILES, marker="# fault: dtype", step=2)
def dtype(context: Context) -> None:
    """Rank 1 gets a bfloat16 batch at step 2."""
    w_DD = context.randn(16, 16)

    def block(x_BD: Tensor) -> Tensor:  # fault: dtype
        y_BD = x_BD.float() @ w_DD
        return funcol.all_reduce(y_BD, "sum", context.group)

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step, x_BD in _batches(context):
        compiled(x_BD.to(torch.bfloat16) if context.faulty(step) else x_BD)


@fault(Cause.REQUIRES_GRAD, _RECOMPILES, marker=_BLOCK, step=2)
def requires_grad(context: Context) -> None:
    """The batch of rank 1 requires grad at step 2."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        block(x_BD.requires_grad_() if context.faulty(step) else x_BD)


@fault(Cause.GRAD_MODE, _RECOMPILES, marker=_BLOCK, step=2)
def no_grad(context: Context) -> None:
    """Rank 1 calls the block under no_grad at step 2."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        with torch.no_grad() if context.faulty(step) else nullcontext():
            block(x_BD)


@fault(Cause.DISPATCH_KEY, _RECOMPILES, marker=_BLOCK, step=2)
def inference_tensor(context: Context) -> None:
    """The batch of rank 1 is an inference tensor at step 2."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        with torch.inference_mode(context.faulty(step)):
            fed_BD = x_BD + 1
        with torch.no_grad():
            block(fed_BD)


@fault(
    Cause.DISPATCH_KEY,
    "pytorch#175849: branches differ by input type, compile counts of ranks differ",
    marker="# fault: inference weight",
)
def inference_weight(context: Context) -> None:
    """A weight of rank 1 was made under inference mode, before the first compile."""
    with torch.inference_mode(context.faulty(0)):
        w_DD = context.randn(16, 16) * 1.0

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD  # fault: inference weight
        return funcol.all_reduce(y_BD, "sum", context.group)

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    with torch.no_grad():
        for _, x_BD in _batches(context):
            compiled(x_BD)


@fault(
    Cause.TENSOR_SUBCLASS,
    "pytorch#180614: an AsyncCollectiveTensor at the graph's boundary is not waited for",
    marker=_BLOCK,
    step=2,
)
def async_tensor(context: Context) -> None:
    """Rank 1 passes an AsyncCollectiveTensor at step 2."""
    block = _block(context, dynamic=False)
    for step, x_BD in _batches(context):
        summed_BD = funcol.all_reduce(x_BD, "sum", context.group)  # replicated
        block(summed_BD if context.faulty(step) else funcol.wait_tensor(summed_BD))


@fault(
    Cause.PYTHON_VALUE,
    "pytorch#175849 (pytorch#165988): a tensor on one rank, an int on the other",
    marker="# fault: tensor or number",
    step=2,
)
def tensor_or_number(context: Context) -> None:
    """The scale is a Python number on rank 1 at step 2, a tensor before and on rank 0."""
    w_DD = context.randn(16, 16)

    def block(x_BD: Tensor, scale: Tensor | float) -> Tensor:  # fault: tensor or number
        y_BD = x_BD @ w_DD * scale  # fault: tensor or number
        return funcol.all_reduce(y_BD, "sum", context.group)

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step, x_BD in _batches(context):
        compiled(x_BD, 0.5 if context.faulty(step) else torch.tensor(0.5, device=context.device))


@fault(
    Cause.SHAPE,
    "pytorch#130935: NCCL timeouts while some ranks compile, automatic dynamic decided per rank",
    marker=_BLOCK,
    step=2,
)
def automatic_dynamic(context: Context) -> None:
    """Rank 1 sees sizes 8, 8, 9 and makes the size dynamic, rank 0 sees 8, 8, 8."""
    block = _block(context)
    for step in range(context.num_steps):
        block(context.randn(9 if context.faulty(step) else 8, 16))


@fault(
    Cause.PYTHON_VALUE,
    "torchtitan#1649, torchtitan#1640: some ranks hang while compiling MoE, sizes depend on the data",
    marker="# fault: split sizes",
    step=2,
)
def split_sizes(context: Context) -> None:
    """Rank 1 passes different split sizes to an all-to-all at step 2."""

    def exchange(x_BD: Tensor, sizes: list[int]) -> Tensor:  # fault: split sizes
        return funcol.all_to_all_single(x_BD, sizes, sizes, context.group) * 2  # fault: split sizes

    compiled = torch.compile(exchange, backend=context.backend, dynamic=False)
    for step, x_BD in _batches(context):
        compiled(x_BD, [6, 2] if context.faulty(step) else [4, 4])
