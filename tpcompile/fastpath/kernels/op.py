"""Launcher of Triton kernels -> custom op, and its arguments checked before anything is launched.

Inductor passes a Python float to a kernel as float64, Triton's own launch as float32 (pytorch 190340). A kernel casts
it where it reads it: what it meets is float64 otherwise, and took 1.3 to 1.8 times as long on an H200 (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import CustomOpDef, custom_op, triton_op, wrap_triton

from tpcompile.errors import FastPathError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types of the kernels; statistics are in float32 for all of them."""


def is_interpreted() -> bool:
    """True when this process runs kernels in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors and NumPy."""
    return bool(triton.knobs.runtime.interpret)


def kernel_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a launcher the op `name`: a `triton_op`, whose kernels Inductor sees, or an opaque one when interpreted.

    The interpreter cannot run on the fake tensors with which Inductor traces a `triton_op`.
    """
    make = custom_op if is_interpreted() else triton_op
    return make(name, mutates_args=())


def exchange_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a launcher that changes its argument `state` the op `name`, which torch.compile does not look into.

    Inductor looks into the kernels of a `triton_op` for what they change. It cannot follow stores through addresses,
    takes every argument for changed, and copies them all.
    """
    return custom_op(name, mutates_args=("state",))


def launchable(kernel: Any) -> Any:
    """A kernel as launchers index it by a grid: visible to torch.compile, unless interpreted."""
    return kernel if is_interpreted() else wrap_triton(kernel)


def block_of(size: int) -> int:
    """Smallest power of two that holds `size`: what a Triton range needs."""
    return int(triton.next_power_of_2(size))


def warps_of(elements: int) -> int:
    """Warps of a program that holds so many elements of a row. Measured on an H200 at 8 to 4680 rows."""
    return max(2, min(8, block_of(elements) // 1024))


def check_rows(op: str, **tensors: Tensor) -> None:
    """Refuse what no kernel here can take: dtypes, dense last dims, devices; FastPathError before the launch."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise FastPathError(f"{op}: {name} is {tensor.dtype}; it takes float32, bfloat16 and float16")
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise FastPathError(
                f"{op}: {name} has stride {tensor.stride(-1)} in its last dim; pass {name}.contiguous()"
            )
        if tensor.device != first.device:
            raise FastPathError(f"{op}: {name} is on {tensor.device} and the first tensor on {first.device}")
    if first.device.type != "cuda" and not is_interpreted():
        raise FastPathError(f"{op}: tensors are on {first.device}; Triton needs a GPU, or TRITON_INTERPRET=1")


def check_heads(
    op: str, *, tables: tuple[Tensor, Tensor], per_head: bool = False, **activations: tuple[Tensor, Tensor]
) -> None:
    """Refuse widths that the head size does not divide, weights and rotary tables of a different size.

    `activations` are pairs of activation [B, S, heads * E] and weight, [heads * E] or `per_head` [E]; `tables` are
    [S, E / 2].
    """
    cos_SR, sin_SR = tables
    size = 2 * cos_SR.shape[-1]
    for name, (x, weight) in activations.items():
        _batch, num_tokens, width = x.shape
        if width % size:
            raise FastPathError(
                f"{op}: {name} is {width} wide, no multiple of the head size {size} of the rotary tables"
            )
        if weight.shape != ((size if per_head else width),):
            whose = f"one head of {size}" if per_head else "this rank's slice"
            raise FastPathError(f"{op}: {name} is {width} wide and its weight {list(weight.shape)}; pass {whose}")
        if cos_SR.shape[0] != num_tokens or cos_SR.shape != sin_SR.shape:
            shapes = f"{list(cos_SR.shape)} and {list(sin_SR.shape)}"
            raise FastPathError(f"{op}: {name} has {num_tokens} tokens; cos and sin are {shapes}")
