"""A module and its inputs -> the same with every number moved by one unit in its last place.

What such a run returns shows how far equal programs may be apart where rounding decides: a gradient that is nothing but
rounding, which Adam scales up to a whole step, or a token that is as near to one expert as to a different one. The
error of one run alone may be small there by chance.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from tpcompile.numerics import error_ratio

NUM_RUNS = 3
"""Runs from which the spread is taken."""
_Inputs = TypeVar("_Inputs")


def move_weights(module: nn.Module, *, seed: int) -> None:
    """Move each number of the parameters by one unit in its last place, up or down."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.copy_(_moved(parameter, generator))


def moved_inputs(inputs: _Inputs, *, seed: int) -> _Inputs:
    """The same inputs with the numbers of their floating tensors moved so; those that require a gradient still do."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for tensor in error_ratio.named_tensors(inputs, "").values():
        if tensor.is_floating_point():
            tensor = _moved(tensor.detach(), generator).requires_grad_(tensor.requires_grad)
        tensors.append(tensor)
    moved: _Inputs = error_ratio.replaced(inputs, tensors)
    return moved


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    unit = torch.finfo(tensor.dtype).eps
    return tensor + (tensor * signs * unit).to(tensor.dtype)
