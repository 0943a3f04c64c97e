"""Undeclared user Triton kernels in the compiled graph; they need a GPU, so this is imported when asked for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor, nn

from tpcompile.gate.faults.fault import FaultContext
from tpcompile.gate.faults.program import Wrapped

_BLOCK = 1024
_VENDORED = '''"""Stands for a published package."""

import torch
import triton
import triton.language as tl


@triton.jit
def vendored_kernel(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * (FACTOR), mask=mask)


def scale(x):
    y = torch.empty_like(x)
    vendored_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
'''


@triton.jit
def local_scale_kernel(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy `numel` elements, as any fused kernel that was not checked on a shard."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


class TritonKernel(Wrapped):
    """Calls the undeclared kernel."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        y = torch.empty_like(x)
        local_scale_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), BLOCK=_BLOCK)
        return self.inner(y, *rest)


@torch.library.custom_op("tpcompile_faults::hidden_scale", mutates_args=())
def hidden_scale(x: Tensor) -> Tensor:
    """Launches the kernel where no graph has it."""
    y = torch.empty_like(x)
    local_scale_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), BLOCK=_BLOCK)
    return y


@hidden_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


hidden_scale.register_autograd(lambda ctx, grad: grad * 1.0)


class HiddenKernel(Wrapped):
    """Calls the op that hides the kernel."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = hidden_scale(x)
        return self.inner(x, *rest)


class _KernelInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        y = torch.empty_like(grad)
        local_scale_kernel[(triton.cdiv(grad.numel(), _BLOCK),)](grad, y, grad.numel(), BLOCK=_BLOCK)
        return y


class BackwardKernel(Wrapped):
    """Calls a function with the kernel in its backward."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = _KernelInBackward.apply(x)
        return self.inner(x, *rest)


class KernelGrids(Wrapped):
    """Launches more blocks on higher ranks; the rank folds with no guard."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        y = torch.empty_like(x)
        num_blocks = triton.cdiv(x.numel(), _BLOCK) + 4 * dist.get_rank()
        local_scale_kernel[(num_blocks,)](x, y, x.numel(), BLOCK=_BLOCK)
        return self.inner(y, *rest)


class VendoredKernel(Wrapped):
    """Calls a function of an installed package."""

    def __init__(self, inner: nn.Module, context: FaultContext, *, factor: str = "1.0") -> None:
        super().__init__(inner, context)
        self.folder = TemporaryDirectory()
        self.vendored = _installed(Path(self.folder.name), factor)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = self.vendored.scale(x)
        return self.inner(x, *rest)


class OtherVersion(VendoredKernel):
    """One rank has a package that computes the same with different source."""

    def __init__(self, inner: nn.Module, context: FaultContext) -> None:
        super().__init__(inner, context, factor="1.0 + 0.0" if context.is_target else "1.0")


def _installed(folder: Path, factor: str) -> ModuleType:
    """The package with that factor, imported from a site-packages of its own."""
    file = folder / "site-packages" / "vendored.py"
    file.parent.mkdir()
    file.write_text(_VENDORED.replace("FACTOR", factor))
    spec = importlib.util.spec_from_file_location("vendored", file)
    assert spec is not None and spec.loader is not None, "it is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo imports it by name
    spec.loader.exec_module(module)
    return module
