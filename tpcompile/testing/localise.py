"""A module with wrong numbers and its float64 twin -> the first module whose output is off."""

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

    An output that is sharded in `size` equal parts of the last dim (any number by default) is compared with the rank's
    slice; another layout, such as replicated or padded heads, is left out. Empty when every module is right.
    """
    for name, tensors in got.items():
        for tensor, one, full in zip(tensors, single[name], exact[name], strict=True):
            if tensor.shape[-1] != full.shape[-1]:
                width, whole = tensor.shape[-1], full.shape[-1]
                if (rank + 1) * width > whole or (size is not None and width * size != whole):
                    continue
                one, full = (t.narrow(-1, rank * width, width) for t in (one, full))
            if tensor.shape != full.shape:
                continue
            normal = float((one.double() - full).norm())
            error = float((tensor.double() - full).norm())
            floor = torch.finfo(tensor.dtype).eps / 4 * float(full.norm())
            if not error <= limit * max(normal, floor):
                return name
    return ""
