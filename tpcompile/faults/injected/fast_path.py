"""A fast path that takes a shard for the whole tensor; declared when this module is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath import fast_path
from tpcompile.faults.injected.program import Wrapped


def plain_scale(x: Tensor) -> Tensor:
    """What the fast path replaces."""
    return x * 1.0


@torch.library.custom_op("tpcompile_faults::single_gpu_scale", mutates_args=())
def single_gpu_scale(x: Tensor) -> Tensor:
    """Stands for a fused kernel."""
    return plain_scale(x)


@single_gpu_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


single_gpu_scale.register_autograd(lambda ctx, grad: grad * 1.0)
fast_path("injected_scale", replaces=plain_scale)(single_gpu_scale)


class SingleGpuFastPath(Wrapped):
    """Calls it wherever it runs."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run the fast path, then the stack."""
        x = single_gpu_scale(x)
        return self.inner(x, *rest)


class FastPathInEager(Wrapped):
    """Calls it in eager only."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run the fast path where nothing is compiled, then the stack."""
        if not torch.compiler.is_compiling():
            x = single_gpu_scale(x)
        return self.inner(x, *rest)
