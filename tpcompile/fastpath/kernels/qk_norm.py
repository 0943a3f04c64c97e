"""Norm of q and k over their full widths under TP, weight and RoPE: packed projections -> the layout of attention.

Two passes, with one all-reduce of [B, S, 2] float32 between them: sums of squares; then all the rest. Both passes have
a backward in plain code, which Inductor fuses.
"""

# B batch, S sequence, h and g heads of q and k on this rank, E head size, R = E / 2; d = h * E, c = g * E
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.backward import turned_back
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_heads, check_rows, kernel_op, launchable, warps_of
from tpcompile.fastpath.kernels.tile import load_tables, scaled_rope_pack, sum_of_squares
from tpcompile.fastpath.registry import TpSupport


@triton.jit
def qk_sums_kernel(
    q, k, sums, num_tokens, q_batch, q_token, k_batch, k_token, q_width, k_width,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: sums[token] = (sum of squares of q, of k)."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    tl.store(sums + row * 2, sum_of_squares(q + batch * q_batch + token * q_token, q_width, Q_BLOCK))
    tl.store(sums + row * 2 + 1, sum_of_squares(k + batch * k_batch + token * k_token, k_width, K_BLOCK))


@triton.jit
def qk_apply_kernel(
    q, k, sums, q_weight, k_weight, cos, sin, q_out, k_out,
    num_tokens, q_batch, q_token, k_batch, k_token, q_heads, k_heads, q_count, k_count, eps,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program per token: q and k normalised by the sums over all ranks, weighted, rotated, as [B, heads, S, E]."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    q_inverse = tl.rsqrt(tl.load(sums + row * 2) / q_count + tl.cast(eps, tl.float32))
    k_inverse = tl.rsqrt(tl.load(sums + row * 2 + 1) / k_count + tl.cast(eps, tl.float32))
    cosine, sine = load_tables(cos, sin, token, PAIRS_PER_HEAD, PAIRS)
    scaled_rope_pack(
        q + batch * q_batch + token * q_token, q_inverse, q_weight, cosine, sine, q_out, batch, token, num_tokens,
        q_heads, PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED,
    )  # fmt: skip
    scaled_rope_pack(
        k + batch * k_batch + token * k_token, k_inverse, k_weight, cosine, sine, k_out, batch, token, num_tokens,
        k_heads, PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED,
    )  # fmt: skip


@kernel_op("tpcompile::qk_sums")
def qk_sums(q_BSd: Tensor, k_BSc: Tensor) -> Tensor:
    """Sums of squares of every token of q and k: [B, S, d], [B, S, c] -> [B, S, 2] float32.

    Raises FastPathError for element types, strides and devices that it cannot take.
    """
    check_rows("qk_sums", q=q_BSd, k=k_BSc)
    batch, num_tokens, q_width = q_BSd.shape
    k_width = k_BSc.shape[-1]
    sums_BS2 = q_BSd.new_empty((batch, num_tokens, 2), dtype=torch.float32)
    if sums_BS2.numel():
        launchable(qk_sums_kernel)[(batch * num_tokens,)](
            q_BSd, k_BSc, sums_BS2, num_tokens, *q_BSd.stride()[:2], *k_BSc.stride()[:2], q_width, k_width,
            Q_BLOCK=block_of(q_width), K_BLOCK=block_of(k_width), num_warps=warps_of(q_width),
        )  # fmt: skip
    return sums_BS2


@kernel_op("tpcompile::qk_apply")
def qk_apply(
    q_BSd: Tensor,
    k_BSc: Tensor,
    sums_BS2: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    q_count: int,
    k_count: int,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Norm by the sums over all ranks, weight, RoPE: -> [B, h, S, E] and [B, g, S, E], contiguous.

    The tables are [S, R]. Raises FastPathError for element types, strides, widths and devices that it cannot take.
    """
    check_rows("qk_apply", q=q_BSd, k=k_BSc, sums=sums_BS2, q_weight=q_weight_d, k_weight=k_weight_c, cos=cos_SR)
    check_heads("qk_apply", q=(q_BSd, q_weight_d), k=(k_BSc, k_weight_c), tables=(cos_SR, sin_SR))
    batch, num_tokens, _ = q_BSd.shape
    pairs = cos_SR.shape[-1]
    q_heads, k_heads = q_BSd.shape[-1] // (2 * pairs), k_BSc.shape[-1] // (2 * pairs)
    q_BhSE = q_BSd.new_empty((batch, q_heads, num_tokens, 2 * pairs))
    k_BgSE = k_BSc.new_empty((batch, k_heads, num_tokens, 2 * pairs))
    if sums_BS2.numel():
        launchable(qk_apply_kernel)[(batch * num_tokens,)](
            q_BSd, k_BSc, sums_BS2.contiguous(), q_weight_d, k_weight_c, cos_SR.contiguous(), sin_SR.contiguous(),
            q_BhSE, k_BgSE, num_tokens, *q_BSd.stride()[:2], *k_BSc.stride()[:2], q_heads, k_heads, q_count, k_count,
            eps, PAIRS_PER_HEAD=pairs, PAIRS=block_of(pairs), Q_HEADS=block_of(q_heads), K_HEADS=block_of(k_heads),
            INTERLEAVED=interleaved, num_warps=warps_of(q_BSd.shape[-1]),
        )  # fmt: skip
    return q_BhSE, k_BgSE


@qk_sums.register_fake
def _(q_BSd: Tensor, k_BSc: Tensor) -> Tensor:
    return q_BSd.new_empty((*q_BSd.shape[:2], 2), dtype=torch.float32)


@qk_apply.register_fake
def _(
    q_BSd: Tensor, k_BSc: Tensor, sums_BS2: Tensor, q_weight: Tensor, k_weight: Tensor, cos_SR: Tensor, *_: Any
) -> Any:
    size = 2 * cos_SR.shape[-1]
    batch, num_tokens, _width = q_BSd.shape
    return tuple(x.new_empty((batch, x.shape[-1] // size, num_tokens, size)) for x in (q_BSd, k_BSc))


def _save_sums(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _sums_backward(ctx: Any, grad_BS2: Tensor) -> tuple[Tensor, ...]:
    grads = []
    for x, grad_BS1 in zip(ctx.saved_tensors, grad_BS2.split(1, -1), strict=True):
        grads.append((2 * grad_BS1 * x.float()).to(x.dtype))
    return tuple(grads)


def _save_apply(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, q_count, k_count, eps, interleaved = inputs
    ctx.save_for_backward(*tensors)
    ctx.counts, ctx.eps, ctx.interleaved = (q_count, k_count), eps, interleaved


def _apply_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    q, k, sums_BS2, q_weight, k_weight, cos_SR, sin_SR = ctx.saved_tensors
    q_grad_BSd, k_grad_BSc = (turned_back(grad, cos_SR, sin_SR, ctx.interleaved).flatten(-2) for grad in grads)
    q_sum, k_sum = sums_BS2.split(1, -1)
    q_count, k_count = ctx.counts
    q_grad, q_sum_grad, q_weight_grad = _norm_backward(q, q_sum, q_weight, q_grad_BSd, q_count, ctx.eps)
    k_grad, k_sum_grad, k_weight_grad = _norm_backward(k, k_sum, k_weight, k_grad_BSc, k_count, ctx.eps)
    return q_grad, k_grad, torch.cat((q_sum_grad, k_sum_grad), -1), q_weight_grad, k_weight_grad, *(None,) * 6


def _norm_backward(
    x_BSd: Tensor, sum_BS1: Tensor, weight_d: Tensor, grad_BSd: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the activation, of the sum of squares over all ranks, of the weight."""
    inverse_BS1 = torch.rsqrt(sum_BS1 / count + eps)
    wide_BSd = x_BSd.float()
    weight_grad_d = (grad_BSd * (wide_BSd * inverse_BS1).to(x_BSd.dtype)).sum((0, 1))
    scaled_BSd = grad_BSd * weight_d.float()
    sum_grad_BS1 = (scaled_BSd * wide_BSd).sum(-1, keepdim=True) * inverse_BS1**3 * (-0.5 / count)
    return (scaled_BSd * inverse_BS1).to(x_BSd.dtype), sum_grad_BS1, weight_grad_d.to(weight_d.dtype)


qk_sums.register_autograd(_sums_backward, setup_context=_save_sums)
qk_apply.register_autograd(_apply_backward, setup_context=_save_apply)


@fast_path(
    "qk_norm_rope",
    replaces=plain.qk_norm_rope,
    tp=TpSupport.DISTRIBUTED_STATS,
    dtypes=DTYPES,
    autograd=True,
)
def qk_norm_rope(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    counts: tuple[int, int],
    eps: float,
    interleaved: bool = False,
    all_reduce: plain.AllReduce = plain.alone,
) -> tuple[Tensor, Tensor]:
    """As `plain.qk_norm_rope`, in two kernels around the all-reduce."""
    sums_BS2 = all_reduce(qk_sums(q_BSd, k_BSc))
    return qk_apply(q_BSd, k_BSc, sums_BS2, q_weight_d, k_weight_c, cos_SR, sin_SR, *counts, eps, interleaved)
