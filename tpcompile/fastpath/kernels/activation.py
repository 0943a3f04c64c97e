"""Activations of MLPs, on hidden features that are sharded: GELU in its tanh form, and SiLU of a gate times up."""

# f hidden features of this rank
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_rows, kernel_op, launchable
from tpcompile.fastpath.registry import TpSupport

_MAX_BLOCK = 1024
"""Elements of a program. Measured on an H200, 8 to 4680 rows of 1728 to 14336: 1024 is best, or within 5 %."""


@triton.jit
def gelu_kernel(x, out, width, x_row, BLOCK: tl.constexpr):
    """One program: a block of a row. 1 + tanh(z) is 2 sigmoid(2 z), which takes one exponential."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    value = tl.load(x + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    tl.store(out + row * width + at, value * tl.sigmoid(2 * inner), mask=mask)


@triton.jit
def silu_mul_kernel(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):
    """One program: a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gates = tl.load(gate + row * gate_row + at, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, gates * tl.sigmoid(gates) * ups, mask=mask)


@kernel_op("tpcompile::gelu")
def gelu(x_f: Tensor) -> Tensor:
    """[..., f] -> [..., f], contiguous.

    Raises FastPathError for element types, strides and devices that it cannot take.
    """
    check_rows("gelu", x=x_f)
    out_f = x_f.new_empty(x_f.shape)
    width = x_f.shape[-1]
    if x_f.numel():
        rows_f = x_f.reshape(-1, width)
        block = min(_MAX_BLOCK, block_of(width))
        grid = (rows_f.shape[0], triton.cdiv(width, block))
        launchable(gelu_kernel)[grid](rows_f, out_f, width, rows_f.stride(0), BLOCK=block)
    return out_f


@kernel_op("tpcompile::silu_mul")
def silu_mul_op(gate_f: Tensor, up_f: Tensor) -> Tensor:
    """[..., f] twice -> [..., f], contiguous; rows may lie apart, as in the halves of a packed projection.

    Raises FastPathError for element types, shapes, strides and devices that it cannot take.
    """
    check_rows("silu_mul", gate=gate_f, up=up_f)
    if gate_f.shape != up_f.shape:
        raise FastPathError(f"silu_mul: gate is {list(gate_f.shape)} and up {list(up_f.shape)}; they must be equal")
    out_f = gate_f.new_empty(gate_f.shape)
    width = gate_f.shape[-1]
    if gate_f.numel():
        gates_f, ups_f = gate_f.reshape(-1, width), up_f.reshape(-1, width)
        block = min(_MAX_BLOCK, block_of(width))
        grid = (gates_f.shape[0], triton.cdiv(width, block))
        launchable(silu_mul_kernel)[grid](gates_f, ups_f, out_f, width, gates_f.stride(0), ups_f.stride(0), BLOCK=block)
    return out_f


@gelu.register_fake
@silu_mul_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save_gelu(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: Any, grad_f: Tensor) -> Tensor:
    (x_f,) = ctx.saved_tensors
    return torch.ops.aten.gelu_backward(grad_f, x_f, approximate="tanh")


def _save_silu_mul(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_backward(ctx: Any, grad_f: Tensor) -> tuple[Tensor, Tensor]:
    gate_f, up_f = ctx.saved_tensors
    return torch.ops.aten.silu_backward(grad_f * up_f, gate_f), grad_f * F.silu(gate_f)


gelu.register_autograd(_gelu_backward, setup_context=_save_gelu)
silu_mul_op.register_autograd(_silu_mul_backward, setup_context=_save_silu_mul)


@fast_path("gelu_tanh", replaces=plain.gelu_tanh, tp=TpSupport.POINTWISE, dtypes=DTYPES, autograd=True)
def gelu_tanh(x_f: Tensor) -> Tensor:
    """As `plain.gelu_tanh`, in one kernel."""
    return gelu(x_f)


@fast_path("silu_mul", replaces=plain.silu_mul, tp=TpSupport.POINTWISE, dtypes=DTYPES, autograd=True)
def silu_mul(gate_f: Tensor, up_f: Tensor) -> Tensor:
    """As `plain.silu_mul`, in one kernel."""
    return silu_mul_op(gate_f, up_f)
