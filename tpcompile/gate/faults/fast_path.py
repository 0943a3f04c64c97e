"""Fast paths that are wrong on shards: one is declared when this module is imported, two are those of the block."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.fastpath import fast_path, registry
from tpcompile.fastpath.source import python_function
from tpcompile.gate.faults.fault import FaultContext
from tpcompile.gate.faults.program import Wrapped
from tpcompile.nn.attention import Attention
from tpcompile.nn.block import TransformerBlock


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
        x = single_gpu_scale(x)
        return self.inner(x, *rest)


class FastPathInEager(Wrapped):
    """Calls it in eager only."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            x = single_gpu_scale(x)
        return self.inner(x, *rest)


def call_single_gpu_norm(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Let attention call the kernel for one GPU; it has norms over the full widths."""
    from tpcompile.fastpath.kernels.qkv_pack import qkv_pack_rmsnorm_rope  # imports Triton

    for module in stack.modules():
        if isinstance(module, Attention):
            module.fast_path, module.takes_packed = qkv_pack_rmsnorm_rope, True
    return stack


def call_edited_norm(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Let the block call its fast path for the residual add and the norm, after an edit that changes no number."""
    from tpcompile.fastpath.kernels import token_norm  # imports Triton

    for kernel in (token_norm.add_norm_kernel, token_norm.modulated_norm_kernel):
        _edit(kernel, "/ width + eps", "/ width + (eps + 0.0)")
    for module in stack.modules():
        site = module.site(1, 1) if isinstance(module, TransformerBlock) else None
        if site is not None:
            module.fast_path = getattr(token_norm, site.path)
    return stack


def _edit(kernel: Any, before: str, after: str) -> None:
    """Change the source of a kernel, and read again that of the fast paths which it is part of."""
    function = python_function(kernel)
    assert function is not None, "a kernel is made from one"
    written = textwrap.dedent(inspect.getsource(function))
    source = written.partition("\n")[2]  # without the decorator
    file = Path(mkdtemp(), f"edited_{function.__name__}.py")
    file.write_text(source.replace(before, after))
    made: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), dict(function.__globals__), made)
    function.__code__ = made[function.__name__].__code__
    for path in registry.registered().values():
        if function in path.source.functions:
            registry.add(replace(path))
