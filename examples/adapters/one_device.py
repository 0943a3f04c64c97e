"""A model and the same model on tensor-parallel ranks -> how far their results are apart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BACKEND = os.environ.get("BACKEND", "inductor")
"""Backend of torch.compile in these examples."""


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks, where this is a shard of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float(
        (whole(found.detach()) - expected.detach()).abs().max() / expected.detach().abs().max().clamp_min(1e-12)
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient of every parameter that has one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def print_errors(
    found: Tensor, expected: Tensor, grads: Mapping[str, Tensor] | None = None, expected_grads: Any = None
) -> None:
    """Print the error of an output and the largest of the gradients on rank 0; every rank calls it."""
    forward = torch.tensor(error(found, expected))
    line = f"forward {forward:.1e}"
    if grads is not None:
        assert grads.keys() == expected_grads.keys(), grads.keys() ^ expected_grads.keys()
        errors = {name.replace("_orig_mod.", ""): error(g, expected_grads[name]) for name, g in grads.items()}
        worst = max(errors, key=lambda name: errors[name])
        line += f", gradients {errors[worst]:.1e} ({worst})"
    if dist.get_rank() == 0:
        print(f"error against one device: {line}", flush=True)
