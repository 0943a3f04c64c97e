"""Norm of q and k over their full widths under TP, weight and RoPE, in one kernel that exchanges its sums with peers.

For inference: it has no backward. `qk_norm` has the same in two kernels around an all-reduce, with one.
"""

# B batch, S sequence, h and g heads of q and k on this rank, E head size, R = E / 2; d = h * E, c = g * E
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.exchange import Exchange, begin, end, publish_pair, sum_of_pairs
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_heads, check_rows, exchange_op, is_interpreted
from tpcompile.fastpath.kernels.tile import load_heads, load_tables, rope_pack
from tpcompile.fastpath.registry import TpSupport

_WORDS = 2
"""Words of a token: the sum of squares of q, and of k."""
_PROGRAMS_PER_SM = 4
_WARPS = 4
_MAX_REGISTERS = 128
"""Of a thread, so that a multiprocessor holds four programs of 128 threads: rows that wait are hidden by others."""


@triton.jit
def qk_exchange_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, state, num_rows, num_tokens, q_batch, q_token, k_batch, k_token,
    q_heads, k_heads, q_count, k_count, eps,
    NUM_RANKS: tl.constexpr, PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Every program takes the rows (tokens of the batch) index, index + number of programs, ... in order."""
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:
        batch = row // num_tokens
        token = row % num_tokens
        q_a, q_b = load_heads(
            q + batch * q_batch + token * q_token, q_heads, PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED
        )
        k_a, k_b = load_heads(
            k + batch * k_batch + token * k_token, k_heads, PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED
        )
        tag = begin(state, row, NUM_RANKS)
        q_sum = tl.sum(q_a * q_a + q_b * q_b)
        k_sum = tl.sum(k_a * k_a + k_b * k_b)
        publish_pair(state, row, tag, q_sum, k_sum, NUM_RANKS, INTERPRETED)
        q_weight_a, q_weight_b = load_heads(q_weight, q_heads, PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED)
        k_weight_a, k_weight_b = load_heads(k_weight, k_heads, PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED)
        cosine, sine = load_tables(cos, sin, token, PAIRS_PER_HEAD, PAIRS)
        q_sum, k_sum = sum_of_pairs(state, row, tag, NUM_RANKS, INTERPRETED)
        q_inverse = tl.rsqrt(q_sum / q_count + eps)
        k_inverse = tl.rsqrt(k_sum / k_count + eps)
        rope_pack(
            q_a * q_inverse * q_weight_a, q_b * q_inverse * q_weight_b, cosine, sine, q_out, batch, token, num_tokens,
            q_heads, PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED,
        )  # fmt: skip
        rope_pack(
            k_a * k_inverse * k_weight_a, k_b * k_inverse * k_weight_b, cosine, sine, k_out, batch, token, num_tokens,
            k_heads, PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED,
        )  # fmt: skip
        end(state, row, tag, NUM_RANKS)
        row += tl.num_programs(0)


@exchange_op("tpcompile::qk_exchange")
def qk_exchange(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    state: Tensor,
    num_ranks: int,
    num_programs: int,
    q_count: int,
    k_count: int,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """-> [B, h, S, E] and [B, g, S, E], contiguous; `state`, `num_ranks` and `num_programs` are those of an Exchange.

    Raises FastPathError for element types, strides, widths and devices that it cannot take.
    """
    check_rows("qk_exchange", q=q_BSd, k=k_BSc, q_weight=q_weight_d, k_weight=k_weight_c, cos=cos_SR, sin=sin_SR)
    check_heads("qk_exchange", q=(q_BSd, q_weight_d), k=(k_BSc, k_weight_c), tables=(cos_SR, sin_SR))
    batch, num_tokens, _ = q_BSd.shape
    if k_BSc.shape[0] != batch:
        raise FastPathError(f"qk_exchange: q is a batch of {batch} and k of {k_BSc.shape[0]}; they must be equal")
    pairs = cos_SR.shape[-1]
    q_heads, k_heads = q_BSd.shape[-1] // (2 * pairs), k_BSc.shape[-1] // (2 * pairs)
    q_BhSE = q_BSd.new_empty((batch, q_heads, num_tokens, 2 * pairs))
    k_BgSE = k_BSc.new_empty((batch, k_heads, num_tokens, 2 * pairs))
    num_rows = batch * num_tokens
    if num_rows:
        qk_exchange_kernel[(min(num_rows, _PROGRAMS_PER_SM * num_programs),)](
            q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR.contiguous(), sin_SR.contiguous(), q_BhSE, k_BgSE, state,
            num_rows, num_tokens, *q_BSd.stride()[:2], *k_BSc.stride()[:2], q_heads, k_heads, q_count, k_count, eps,
            NUM_RANKS=num_ranks, PAIRS_PER_HEAD=pairs, PAIRS=block_of(pairs), Q_HEADS=block_of(q_heads),
            K_HEADS=block_of(k_heads), INTERLEAVED=interleaved, INTERPRETED=is_interpreted(), num_warps=_WARPS,
            maxnreg=_MAX_REGISTERS,
        )  # fmt: skip
    return q_BhSE, k_BgSE


@qk_exchange.register_fake
def _(q_BSd: Tensor, k_BSc: Tensor, q_weight: Tensor, k_weight: Tensor, cos_SR: Tensor, *_: Any) -> Any:
    size = 2 * cos_SR.shape[-1]
    batch, num_tokens, _width = q_BSd.shape
    return tuple(x.new_empty((batch, x.shape[-1] // size, num_tokens, size)) for x in (q_BSd, k_BSc))


@fast_path(
    "qk_norm_rope_exchange",
    replaces=plain.qk_norm_rope,
    tp=TpSupport.DISTRIBUTED_STATS,
    dtypes=DTYPES,
)
def qk_norm_rope_exchange(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    counts: tuple[int, int],
    eps: float,
    exchange: Exchange,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `plain.qk_norm_rope`, in one kernel; `exchange` has at least B * S rows of 2 words."""
    exchange.check_call("qk_norm_rope_exchange", q_BSd, _WORDS)
    return qk_exchange(
        q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR, sin_SR, exchange.state, exchange.num_ranks,
        exchange.num_programs, *counts, eps, interleaved,
    )  # fmt: skip
