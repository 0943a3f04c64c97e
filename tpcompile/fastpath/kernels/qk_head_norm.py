"""Norm of every head of q and k on its own, weight and RoPE: packed projections -> the layout of attention, one pass.

No rank needs another: a head is whole on its rank. The weights are replicated and used for other heads on every rank,
so that their gradient is partial: enter them with `copy_to_tp` first.
"""

# B batch, S sequence, h and g heads of q and k on this rank, E head size, R = E / 2; d = h * E, c = g * E
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.backward import rms_norm_backward, turned_back
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_heads, check_rows, kernel_op, launchable, warps_of
from tpcompile.fastpath.kernels.tile import load_heads, load_tables, rope_pack
from tpcompile.fastpath.registry import TpSupport


@triton.jit
def head_norm_rope_pack(
    row, weight, cosine, sine, out, batch, token, num_tokens, num_heads, eps,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`rope_pack` of a row of heads, each normalised on its own, times one weight for all heads."""
    a, b = load_heads(row, num_heads, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    inverse = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * PAIRS_PER_HEAD) + tl.cast(eps, tl.float32))[:, None]
    weight_a, weight_b = load_heads(weight, 1, PAIRS_PER_HEAD, PAIRS, 1, INTERLEAVED)
    rope_pack(
        a * inverse * weight_a, b * inverse * weight_b, cosine, sine, out, batch, token, num_tokens, num_heads,
        PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def qk_head_norm_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out,
    num_tokens, q_batch, q_token, k_batch, k_token, q_heads, k_heads, eps,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    cosine, sine = load_tables(cos, sin, token, PAIRS_PER_HEAD, PAIRS)
    head_norm_rope_pack(
        q + batch * q_batch + token * q_token, q_weight, cosine, sine, q_out, batch, token, num_tokens, q_heads, eps,
        PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED,
    )  # fmt: skip
    head_norm_rope_pack(
        k + batch * k_batch + token * k_token, k_weight, cosine, sine, k_out, batch, token, num_tokens, k_heads, eps,
        PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED,
    )  # fmt: skip


@kernel_op("tpcompile::qk_head_norm")
def qk_head_norm(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """-> [B, h, S, E] and [B, g, S, E], contiguous.

    The tables are [S, R]. Raises FastPathError for element types, strides, widths and devices that it cannot take.
    """
    check_rows("qk_head_norm", q=q_BSd, k=k_BSc, q_weight=q_weight_E, k_weight=k_weight_E, cos=cos_SR)
    check_heads("qk_head_norm", q=(q_BSd, q_weight_E), k=(k_BSc, k_weight_E), tables=(cos_SR, sin_SR), per_head=True)
    batch, num_tokens, q_width = q_BSd.shape
    pairs = cos_SR.shape[-1]
    q_heads, k_heads = q_width // (2 * pairs), k_BSc.shape[-1] // (2 * pairs)
    q_BhSE = q_BSd.new_empty((batch, q_heads, num_tokens, 2 * pairs))
    k_BgSE = k_BSc.new_empty((batch, k_heads, num_tokens, 2 * pairs))
    if batch * num_tokens:
        launchable(qk_head_norm_kernel)[(batch * num_tokens,)](
            q_BSd, k_BSc, q_weight_E, k_weight_E, cos_SR.contiguous(), sin_SR.contiguous(), q_BhSE, k_BgSE, num_tokens,
            *q_BSd.stride()[:2], *k_BSc.stride()[:2], q_heads, k_heads, eps, PAIRS_PER_HEAD=pairs,
            PAIRS=block_of(pairs), Q_HEADS=block_of(q_heads), K_HEADS=block_of(k_heads), INTERLEAVED=interleaved,
            num_warps=warps_of(q_BSd.shape[-1]),
        )  # fmt: skip
    return q_BhSE, k_BgSE


@qk_head_norm.register_fake
def _(q_BSd: Tensor, k_BSc: Tensor, q_weight: Tensor, k_weight: Tensor, cos_SR: Tensor, *_: Any) -> Any:
    size = 2 * cos_SR.shape[-1]
    batch, num_tokens, _width = q_BSd.shape
    return tuple(x.new_empty((batch, x.shape[-1] // size, num_tokens, size)) for x in (q_BSd, k_BSc))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, eps, interleaved = inputs
    ctx.save_for_backward(*tensors)
    ctx.eps, ctx.interleaved = eps, interleaved


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    q_BSd, k_BSc, q_weight_E, k_weight_E, cos_SR, sin_SR = ctx.saved_tensors
    found = []
    for x, weight_E, grad in zip((q_BSd, k_BSc), (q_weight_E, k_weight_E), grads, strict=True):
        heads_BShE = x.unflatten(-1, (-1, weight_E.shape[0]))
        grad_BShE = turned_back(grad, cos_SR, sin_SR, ctx.interleaved)
        x_grad_BShE, weight_grad_E = rms_norm_backward(heads_BShE, weight_E, grad_BShE, ctx.eps)
        found.append((x_grad_BShE.flatten(-2).to(x.dtype), weight_grad_E))
    (q_grad, q_weight_grad), (k_grad, k_weight_grad) = found
    return q_grad, k_grad, q_weight_grad, k_weight_grad, None, None, None, None


qk_head_norm.register_autograd(_backward, setup_context=_save)


@fast_path("qk_head_norm_rope", replaces=plain.qk_head_norm_rope, tp=TpSupport.PER_HEAD, dtypes=DTYPES, autograd=True)
def qk_head_norm_rope(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    eps: float,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `plain.qk_head_norm_rope`, in one kernel."""
    return qk_head_norm(q_BSd, k_BSc, q_weight_E, k_weight_E, cos_SR, sin_SR, eps, interleaved)
