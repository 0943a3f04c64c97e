"""A wrong run and its single-device references -> the first module whose output is wrong.

`wrong_op.py` finds the op in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Outputs = dict[str, list[Tensor]]


def module_outputs(stack: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Run the stack in eager without gradients and keep every module's output tensors, in the order they finish."""
    outputs: Outputs = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            # Copies: an in-place collective of mode A or B overwrites what it is given.
            outputs[name] = [t.detach().clone() for t in tensors if isinstance(t, Tensor)]

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in stack.named_modules() if name]
    try:
        with torch.no_grad():
            stack(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def first_wrong(
    got: Outputs, single: Outputs, exact: Outputs, *, rank: int, limit: float, size: int | None = None
) -> str:
    """Name of the first module, in the order they finish, whose error exceeds `limit` x the single-device error.

    A single-device error below a quarter ulp counts as a quarter ulp.

    An output that is sharded in `size` equal parts of the last dim (any number by default) is compared with the rank's
    slice; a different layout, such as replicated or padded heads, is left out. Empty when every module is right.
    """
    for name, tensors in got.items():
        for tensor, one, full in zip(tensors, single[name], exact[name], strict=True):
            columns = _columns(tensor.shape[-1], full.shape[-1], rank=rank, size=size)
            one, full = one[..., columns], full[..., columns]
            if tensor.shape != full.shape:
                continue
            normal = float((one.double() - full).norm())
            error = float((tensor.double() - full).norm())
            floor = torch.finfo(tensor.dtype).eps / 4 * float(full.norm())
            if not error <= limit * max(normal, floor):  # NaN is wrong
                return name
    return ""


def _columns(width: int, whole: int, *, rank: int, size: int | None) -> slice:
    """The rank's part of the last dim, `width` of `whole`; all of it when it is not sharded in equal parts."""
    is_equal_part = size is None or width * size == whole
    end = (rank + 1) * width
    if not is_equal_part or end > whole:
        return slice(None)
    return slice(end - width, end)
