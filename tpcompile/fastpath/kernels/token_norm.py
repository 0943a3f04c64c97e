"""Residual add and the norm after it, of tokens that are whole on their rank: after the row-parallel all-reduce.

RMSNorm with a weight, as in Llama, and LayerNorm with adaLN's shift and scale, as in Wan.
"""

# B batch, S sequence, D width
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.backward import rms_norm_backward
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_rows, kernel_op, launchable, warps_of
from tpcompile.fastpath.registry import TpSupport


@triton.jit
def add_norm_kernel(x, branch, weight, total, out, width, eps, BLOCK: tl.constexpr):
    """One program per token: the sum, and its RMSNorm times the weight."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    added = tl.load(x + row + at, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(branch + row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(total + row + at, added, mask=mask)
    inverse = tl.rsqrt(tl.sum(added * added) / width + tl.cast(eps, tl.float32))
    scales = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + at, added * inverse * scales, mask=mask)


@triton.jit
def modulated_norm_kernel(
    x, branch, gate, shift, scale, total, out, num_tokens, width, gate_batch, shift_batch, scale_batch, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: x + branch * gate, and its LayerNorm times (1 + scale) plus shift."""
    token = tl.program_id(0).to(tl.int64)
    row = token * width
    batch = token // num_tokens
    at = tl.arange(0, BLOCK)
    mask = at < width
    gates = tl.load(gate + batch * gate_batch + at, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(branch + row + at, mask=mask, other=0.0).to(tl.float32) * gates
    added += tl.load(x + row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(total + row + at, added, mask=mask)
    centred = tl.where(mask, added - tl.sum(added) / width, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred) / width + tl.cast(eps, tl.float32))
    scales = tl.load(scale + batch * scale_batch + at, mask=mask, other=0.0).to(tl.float32)
    shifts = tl.load(shift + batch * shift_batch + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + at, centred * inverse * (1.0 + scales) + shifts, mask=mask)


@kernel_op("tpcompile::add_norm")
def add_norm(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[..., D], [..., D], [D] -> the sum, and its norm times the weight.

    Raises FastPathError for element types, shapes, strides and devices that it cannot take.
    """
    check_rows("add_norm", x=x_D, branch=branch_D, weight=weight_D)
    _check_shapes("add_norm", x_D.shape, branch=branch_D)
    _check_shapes("add_norm", x_D.shape[-1:], weight=weight_D)
    x_D, branch_D = x_D.contiguous(), branch_D.contiguous()
    total_D, out_D = torch.empty_like(x_D), torch.empty_like(x_D)
    width = x_D.shape[-1]
    if x_D.numel():
        launchable(add_norm_kernel)[(x_D.numel() // width,)](
            x_D,
            branch_D,
            weight_D,
            total_D,
            out_D,
            width,
            eps,
            BLOCK=block_of(width),
            num_warps=warps_of(width),
        )
    return total_D, out_D


@kernel_op("tpcompile::modulated_norm")
def modulated_norm(
    x_BSD: Tensor, branch_BSD: Tensor, gate_BD: Tensor, shift_BD: Tensor, scale_BD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """[B, S, D] twice, three of [B, D] -> x + branch * gate, and its modulated norm.

    Raises FastPathError for element types, shapes, strides and devices that it cannot take.
    """
    check_rows("modulated_norm", x=x_BSD, branch=branch_BSD, gate=gate_BD, shift=shift_BD, scale=scale_BD)
    _check_shapes("modulated_norm", x_BSD.shape, branch=branch_BSD)
    _check_shapes("modulated_norm", x_BSD.shape[::2], gate=gate_BD, shift=shift_BD, scale=scale_BD)
    x_BSD, branch_BSD = x_BSD.contiguous(), branch_BSD.contiguous()
    total_BSD, out_BSD = torch.empty_like(x_BSD), torch.empty_like(x_BSD)
    batch, num_tokens, width = x_BSD.shape
    if x_BSD.numel():
        launchable(modulated_norm_kernel)[(batch * num_tokens,)](
            x_BSD, branch_BSD, gate_BD, shift_BD, scale_BD, total_BSD, out_BSD, num_tokens, width,
            gate_BD.stride(0), shift_BD.stride(0), scale_BD.stride(0), eps,
            BLOCK=block_of(width), num_warps=warps_of(width),
        )  # fmt: skip
    return total_BSD, out_BSD


def _check_shapes(op: str, shape: torch.Size, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise FastPathError(f"{op}: {name} is {list(tensor.shape)}, and {list(shape)} is needed")


@add_norm.register_fake
@modulated_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _x, _branch, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)


def _add_backward(ctx: Any, total_grad_D: Tensor, grad_D: Tensor) -> tuple[Tensor | None, ...]:
    total_D, weight_D = ctx.saved_tensors
    norm_grad_D, weight_grad_D = rms_norm_backward(total_D, weight_D, grad_D.float(), ctx.eps)
    x_grad_D = (norm_grad_D + total_grad_D).to(total_D.dtype)
    return x_grad_D, x_grad_D, weight_grad_D, None


def _save_modulated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _x, branch, gate, _shift, scale, ctx.eps = inputs
    ctx.save_for_backward(output[0], branch, gate, scale)


def _modulated_backward(ctx: Any, total_grad_BSD: Tensor, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
    total_BSD, branch_BSD, gate_BD, scale_BD = ctx.saved_tensors
    wide_BSD, grad_BSD = total_BSD.float(), grad_BSD.float()
    centred_BSD = wide_BSD - wide_BSD.mean(-1, keepdim=True)
    inverse_BS1 = torch.rsqrt(centred_BSD.square().mean(-1, keepdim=True) + ctx.eps)
    normed_BSD = centred_BSD * inverse_BS1
    scaled_BSD = grad_BSD * (1 + scale_BD.unsqueeze(1))
    along_BSD = normed_BSD * (scaled_BSD * normed_BSD).mean(-1, keepdim=True)
    norm_grad_BSD = inverse_BS1 * (scaled_BSD - scaled_BSD.mean(-1, keepdim=True) - along_BSD)
    x_grad_BSD = norm_grad_BSD + total_grad_BSD
    branch_grad_BSD = x_grad_BSD * gate_BD.unsqueeze(1)
    sums = ((x_grad_BSD * branch_BSD).sum(1), grad_BSD.sum(1), (grad_BSD * normed_BSD).sum(1))
    dtype = total_BSD.dtype
    return x_grad_BSD.to(dtype), branch_grad_BSD.to(dtype), *(each.to(gate_BD.dtype) for each in sums), None


add_norm.register_autograd(_add_backward, setup_context=_save_add)
modulated_norm.register_autograd(_modulated_backward, setup_context=_save_modulated)


@fast_path("add_rms_norm", replaces=plain.add_rms_norm, tp=TpSupport.PER_TOKEN, dtypes=DTYPES, autograd=True)
def add_rms_norm(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """As `plain.add_rms_norm`, in one kernel."""
    return add_norm(x_D, branch_D, weight_D, eps)


@fast_path(
    "add_modulated_norm", replaces=plain.add_modulated_norm, tp=TpSupport.PER_TOKEN, dtypes=DTYPES, autograd=True
)
def add_modulated_norm(
    x_BSD: Tensor, branch_BSD: Tensor, gate_BD: Tensor, shift_BD: Tensor, scale_BD: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """As `plain.add_modulated_norm`, in one kernel."""
    return modulated_norm(x_BSD, branch_BSD, gate_BD, shift_BD, scale_BD, eps)
