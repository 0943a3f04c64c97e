"""Full-width norm of q and k under TP: sums of squares in one pass; norm, weight, RoPE and packing in another.

Between the two, the sums of q and k are all-reduced together, [B, S, 2] float32.
"""

# B batch, S sequence, h and g heads of q and k on this rank, E head size, R = E / 2; d = h * E, c = g * E
from __future__ import annotations

import triton
import triton.language as tl

from tpcompile.fastpath.kernels.tile import finish_pairs, load_pairs, pair_offsets, store_pairs


@triton.jit
def _sum_of_squares(row, heads, pairs, num_heads, PAIRS_PER_HEAD: tl.constexpr):
    first, second = pair_offsets(heads, pairs, PAIRS_PER_HEAD, False)
    mask = (heads < num_heads) & (pairs < PAIRS_PER_HEAD)
    a, b = load_pairs(row, first, second, mask)
    return tl.sum(a * a + b * b)


@triton.jit
def qk_sums_kernel(
    q, k, sums, num_tokens, q_batch, q_token, k_batch, k_token, q_heads, k_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
):  # fmt: skip
    """One program per token: sums[token] = (sum of squares of q, of k)."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    pairs = tl.arange(0, PAIRS)[None, :]
    q_row = q + batch * q_batch + token * q_token
    k_row = k + batch * k_batch + token * k_token
    q_sum = _sum_of_squares(q_row, tl.arange(0, Q_HEADS)[:, None], pairs, q_heads, PAIRS_PER_HEAD)
    k_sum = _sum_of_squares(k_row, tl.arange(0, K_HEADS)[:, None], pairs, k_heads, PAIRS_PER_HEAD)
    tl.store(sums + row * 2, q_sum)
    tl.store(sums + row * 2 + 1, k_sum)


@triton.jit
def _norm_rope_pack(
    row, weight, cos_row, sin_row, out, inverse, heads, pairs, num_heads, num_tokens,
    PAIRS_PER_HEAD: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One token's heads -> `out`, which points at the token within head 0 of [heads, num_tokens, E]."""
    first, second = pair_offsets(heads, pairs, PAIRS_PER_HEAD, INTERLEAVED)
    mask = (heads < num_heads) & (pairs < PAIRS_PER_HEAD)
    a, b = load_pairs(row, first, second, mask)
    weight_a, weight_b = load_pairs(weight, first, second, mask)
    cos = tl.load(cos_row + pairs, mask=pairs < PAIRS_PER_HEAD, other=0.0).to(tl.float32)
    sin = tl.load(sin_row + pairs, mask=pairs < PAIRS_PER_HEAD, other=0.0).to(tl.float32)
    a, b = finish_pairs(a, b, inverse, weight_a, weight_b, cos, sin, row.dtype.element_ty)
    head = heads.to(tl.int64) * num_tokens * (2 * PAIRS_PER_HEAD)
    first, second = pair_offsets(0, pairs, PAIRS_PER_HEAD, INTERLEAVED)
    store_pairs(out, head + first, head + second, a, b, mask)


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
    pairs = tl.arange(0, PAIRS)[None, :]
    cos_row = cos + token * PAIRS_PER_HEAD
    sin_row = sin + token * PAIRS_PER_HEAD
    q_inverse = tl.rsqrt(tl.load(sums + row * 2) / q_count + eps)
    k_inverse = tl.rsqrt(tl.load(sums + row * 2 + 1) / k_count + eps)
    _norm_rope_pack(
        q + batch * q_batch + token * q_token, q_weight, cos_row, sin_row,
        q_out + (batch * q_heads * num_tokens + token) * (2 * PAIRS_PER_HEAD), q_inverse,
        tl.arange(0, Q_HEADS)[:, None], pairs, q_heads, num_tokens, PAIRS_PER_HEAD, INTERLEAVED,
    )  # fmt: skip
    _norm_rope_pack(
        k + batch * k_batch + token * k_token, k_weight, cos_row, sin_row,
        k_out + (batch * k_heads * num_tokens + token) * (2 * PAIRS_PER_HEAD), k_inverse,
        tl.arange(0, K_HEADS)[:, None], pairs, k_heads, num_tokens, PAIRS_PER_HEAD, INTERLEAVED,
    )  # fmt: skip
