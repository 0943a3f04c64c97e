"""An undeclared user Triton kernel in the compiled graph; needs a GPU, so it is imported when asked for."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpcompile.faults.injected.program import Wrapped

_BLOCK = 1024


@triton.jit
def local_scale_kernel(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy `numel` elements, as any fused kernel that was not checked on a shard."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


class TritonKernel(Wrapped):
    """Calls the undeclared kernel."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run the kernel, then the stack."""
        y = torch.empty_like(x)
        local_scale_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), BLOCK=_BLOCK)
        return self.inner(y, *rest)
