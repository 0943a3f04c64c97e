"""The negative example: q, k, v of one GPU packed, with a norm over what it takes for the full width.

On a shard its mean is the shard's: 1 to 3 % off on random data, inside the tolerance of bfloat16, and off by half
where heads differ in scale. Declared tp=none: free on one GPU, refused on shards. On shards call `qk_norm_rope`.
"""

# B batch, S sequence, h and g heads of q and of k and v, E head size, R = E / 2; d = h * E, c = g * E
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tpcompile.fastpath import plain
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_heads, check_rows, kernel_op, launchable
from tpcompile.fastpath.kernels.tile import norm_rope_pack, sum_of_squares
from tpcompile.fastpath.registry import TpSupport, fast_path


@triton.jit
def qkv_pack_kernel(
    qkv, q_weight, k_weight, cos, sin, q_out, k_out, v_out,
    num_tokens, batch_stride, token_stride, q_heads, k_heads, eps,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    SIZE: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    q = qkv + batch * batch_stride + token * token_stride
    q_width = q_heads * (2 * PAIRS_PER_HEAD)
    k_width = k_heads * (2 * PAIRS_PER_HEAD)
    k = q + q_width
    v = k + k_width
    q_inverse = tl.rsqrt(sum_of_squares(q, q_width, Q_BLOCK) / q_width + eps)
    k_inverse = tl.rsqrt(sum_of_squares(k, k_width, K_BLOCK) / k_width + eps)
    norm_rope_pack(
        q, q_inverse, eps, q_weight, cos, sin, q_out, batch, token, num_tokens, q_heads,
        PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED, PER_HEAD=False,
    )  # fmt: skip
    norm_rope_pack(
        k, k_inverse, eps, k_weight, cos, sin, k_out, batch, token, num_tokens, k_heads,
        PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED, PER_HEAD=False,
    )  # fmt: skip
    heads = tl.arange(0, K_HEADS)[:, None]
    elements = tl.arange(0, SIZE)[None, :]
    mask = (heads < k_heads) & (elements < 2 * PAIRS_PER_HEAD)
    values = tl.load(v + heads * (2 * PAIRS_PER_HEAD) + elements, mask=mask, other=0.0)
    packed = ((batch * k_heads + heads) * num_tokens + token) * (2 * PAIRS_PER_HEAD)
    tl.store(v_out + packed + elements, values, mask=mask)


@kernel_op("tpcompile::qkv_pack")
def qkv_pack(
    qkv: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, d + 2 c] -> [B, h, S, E], [B, g, S, E], [B, g, S, E]; inference only.

    Raises FastPathError for element types, strides, widths and devices that it cannot take.
    """
    check_rows("qkv_pack", qkv=qkv, q_weight=q_weight_d, k_weight=k_weight_c, cos=cos_SR)
    q, k, _ = qkv.split(_widths(q_weight_d, k_weight_c), -1)
    check_heads("qkv_pack", q=(q, q_weight_d), k=(k, k_weight_c), tables=(cos_SR, sin_SR))
    pairs = cos_SR.shape[-1]
    batch, num_tokens, _ = qkv.shape
    widths = _widths(q_weight_d, k_weight_c)
    q_heads, k_heads, _ = (width // (2 * pairs) for width in widths)
    packed = tuple(qkv.new_empty((batch, width // (2 * pairs), num_tokens, 2 * pairs)) for width in widths)
    if batch * num_tokens:
        launchable(qkv_pack_kernel)[(batch * num_tokens,)](
            qkv, q_weight_d, k_weight_c, cos_SR.contiguous(), sin_SR.contiguous(), *packed, num_tokens,
            *qkv.stride()[:2], q_heads, k_heads, eps, PAIRS_PER_HEAD=pairs, PAIRS=block_of(pairs),
            Q_HEADS=block_of(q_heads), K_HEADS=block_of(k_heads), SIZE=block_of(2 * pairs),
            Q_BLOCK=block_of(widths[0]), K_BLOCK=block_of(widths[1]), INTERLEAVED=interleaved,
        )  # fmt: skip
    return packed


@qkv_pack.register_fake
def _(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_SR: Tensor, *_: Any) -> Any:
    size = 2 * cos_SR.shape[-1]
    widths = _widths(q_weight, k_weight)
    return tuple(qkv.new_empty((qkv.shape[0], width // size, qkv.shape[1], size)) for width in widths)


def _widths(q_weight_d: Tensor, k_weight_c: Tensor) -> list[int]:
    return [q_weight_d.shape[0], k_weight_c.shape[0], k_weight_c.shape[0]]


@fast_path("qkv_pack_rmsnorm_rope", replaces=plain.qkv_pack, tp=TpSupport.NONE, dtypes=DTYPES)
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
    """As `plain.qkv_pack`, in one kernel, on one GPU."""
    return qkv_pack(qkv, q_weight_d, k_weight_c, cos_SR, sin_SR, eps, interleaved)
