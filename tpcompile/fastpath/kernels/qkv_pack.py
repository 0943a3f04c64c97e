"""The negative example: q, k, v of one GPU packed, with a norm over what it takes for the full width.

On a shard its mean is the shard's: 1 to 3 % off on random data, inside the tolerance of bfloat16, and off by half
where heads differ in scale. Declared tp=none: free on one GPU, where it reads q and k once, and refused on shards. On
shards call `qk_norm_rope`. Half the usual warps: a program holds one row, and more of them are there at once. Its
backward is plain code, which Inductor fuses; one pass computes the sums of squares again beside its own sums.
"""

# B batch, S sequence, h and g heads of q and of k and v, E head size, R = E / 2; d = h * E, c = g * E
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.backward import rms_norm_backward, turned_back
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_heads, check_rows, kernel_op, launchable, warps_of
from tpcompile.fastpath.kernels.tile import load_heads, load_tables, rope_pack
from tpcompile.fastpath.registry import TpSupport


@triton.jit
def norm_rope_pack(
    row, weight, cosine, sine, out, batch, token, num_tokens, num_heads, eps,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`rope_pack` of a row of heads, normalised over all of it, times a weight; all loads come before the sum."""
    a, b = load_heads(row, num_heads, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    weight_a, weight_b = load_heads(weight, num_heads, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    inverse = tl.rsqrt(tl.sum(a * a + b * b) / (num_heads * (2 * PAIRS_PER_HEAD)) + tl.cast(eps, tl.float32))
    rope_pack(
        a * inverse * weight_a, b * inverse * weight_b, cosine, sine, out, batch, token, num_tokens, num_heads,
        PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def qkv_pack_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out,
    num_tokens, q_batch, q_token, k_batch, k_token, q_heads, k_heads, eps,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Two programs per token: one takes q, one takes k; each holds its row in registers."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    cosine, sine = load_tables(cos, sin, token, PAIRS_PER_HEAD, PAIRS)
    if tl.program_id(1) == 0:
        norm_rope_pack(
            q + batch * q_batch + token * q_token, q_weight, cosine, sine, q_out, batch, token, num_tokens, q_heads,
            eps, PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED,
        )  # fmt: skip
    else:
        norm_rope_pack(
            k + batch * k_batch + token * k_token, k_weight, cosine, sine, k_out, batch, token, num_tokens, k_heads,
            eps, PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED,
        )  # fmt: skip


@kernel_op("tpcompile::qkv_pack")
def qkv_pack(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """[B, S, d] and [B, S, c] -> [B, h, S, E] and [B, g, S, E], contiguous.

    Raises FastPathError for element types, strides, widths and devices that it cannot take.
    """
    check_rows("qkv_pack", q=q_BSd, k=k_BSc, q_weight=q_weight_d, k_weight=k_weight_c, cos=cos_SR)
    check_heads("qkv_pack", q=(q_BSd, q_weight_d), k=(k_BSc, k_weight_c), tables=(cos_SR, sin_SR))
    batch, num_tokens, q_width = q_BSd.shape
    pairs = cos_SR.shape[-1]
    q_heads, k_heads = q_width // (2 * pairs), k_BSc.shape[-1] // (2 * pairs)
    q_BhSE = q_BSd.new_empty((batch, q_heads, num_tokens, 2 * pairs))
    k_BgSE = k_BSc.new_empty((batch, k_heads, num_tokens, 2 * pairs))
    if batch * num_tokens:
        launchable(qkv_pack_kernel)[(batch * num_tokens, 2)](
            q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR.contiguous(), sin_SR.contiguous(), q_BhSE, k_BgSE, num_tokens,
            *q_BSd.stride()[:2], *k_BSc.stride()[:2], q_heads, k_heads, eps, PAIRS_PER_HEAD=pairs,
            PAIRS=block_of(pairs), Q_HEADS=block_of(q_heads), K_HEADS=block_of(k_heads), INTERLEAVED=interleaved,
            num_warps=max(2, warps_of(q_width) // 2),
        )  # fmt: skip
    return q_BhSE, k_BgSE


@qkv_pack.register_fake
def _(q_BSd: Tensor, k_BSc: Tensor, q_weight: Tensor, k_weight: Tensor, cos_SR: Tensor, *_: Any) -> Any:
    size = 2 * cos_SR.shape[-1]
    batch, num_tokens, _width = q_BSd.shape
    return tuple(x.new_empty((batch, x.shape[-1] // size, num_tokens, size)) for x in (q_BSd, k_BSc))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, eps, interleaved = inputs
    ctx.save_for_backward(*tensors)
    ctx.eps, ctx.interleaved = eps, interleaved


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR, sin_SR = ctx.saved_tensors
    q_grad_BSd, k_grad_BSc = (turned_back(grad, cos_SR, sin_SR, ctx.interleaved).flatten(-2) for grad in grads)
    q_grad, q_weight_grad = rms_norm_backward(q_BSd, q_weight_d, q_grad_BSd, ctx.eps)
    k_grad, k_weight_grad = rms_norm_backward(k_BSc, k_weight_c, k_grad_BSc, ctx.eps)
    return q_grad.to(q_BSd.dtype), k_grad.to(k_BSc.dtype), q_weight_grad, k_weight_grad, None, None, None, None


qkv_pack.register_autograd(_backward, setup_context=_save)


@fast_path("qkv_pack_rmsnorm_rope", replaces=plain.qkv_pack, tp=TpSupport.NONE, dtypes=DTYPES, autograd=True)
def qkv_pack_rmsnorm_rope(
    qkv: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    eps: float,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain.qkv_pack`, in one kernel, on one GPU; v stays where it is, as a view [B, g, S, E]."""
    widths = [q_weight_d.shape[0], k_weight_c.shape[0], k_weight_c.shape[0]]
    if qkv.shape[-1] != sum(widths):
        raise FastPathError(f"qkv_pack: qkv is {qkv.shape[-1]} wide, and its parts are {widths}")
    q_BSd, k_BSc, v_BSc = qkv.split(widths, -1)
    q_BhSE, k_BgSE = qkv_pack(q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR, sin_SR, eps, interleaved)
    return q_BhSE, k_BgSE, v_BSc.unflatten(-1, (-1, 2 * cos_SR.shape[-1])).transpose(1, 2)
