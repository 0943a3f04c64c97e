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
from tpcompile.fastpath.kernels.exchange import begin, end, publish_pair, sum_of_pairs
from tpcompile.fastpath.kernels.exchange_memory import Exchange
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_heads, check_rows, exchange_op, is_interpreted
from tpcompile.fastpath.kernels.tile import load_heads, load_tables, rope_pack, store_heads
from tpcompile.fastpath.registry import TpSupport

_WORDS = 2
"""Words of a token: the sum of squares of q, and of k."""
_FEW = {"num_warps": 4, "maxnreg": 128}
"""So that a multiprocessor holds four programs with a row each."""
_FEW_PER_SM = 4
_MANY = {"num_warps": 2, "maxnreg": 80}
"""So that it holds twelve programs: rows that wait are hidden by others."""
_MANY_PER_SM = 12
_TILE_PAIRS = 512
"""8 for each thread of two warps."""


@triton.jit
def qk_exchange_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, state, num_rows, num_tokens, q_batch, q_token, k_batch, k_token,
    q_heads, k_heads, q_count, k_count, eps,
    NUM_RANKS: tl.constexpr, PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """For few rows (tokens of the batch): a program for each, which keeps q and k in registers while it waits."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    q_a, q_b = load_heads(q + batch * q_batch + token * q_token, q_heads, PAIRS_PER_HEAD, PAIRS, Q_HEADS, INTERLEAVED)
    k_a, k_b = load_heads(k + batch * k_batch + token * k_token, k_heads, PAIRS_PER_HEAD, PAIRS, K_HEADS, INTERLEAVED)
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


@triton.jit
def tiled_sum(
    row, num_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sum of squares of a row of heads, TILE heads at a time."""
    squares = tl.zeros((TILE, PAIRS), tl.float32)
    for tile in tl.static_range(TILES):
        first = tile * TILE
        a, b = load_heads(row + first * 2 * PAIRS_PER_HEAD, num_heads - first, PAIRS_PER_HEAD, PAIRS, TILE, INTERLEAVED)
        squares += a * a + b * b
    return tl.sum(squares)


@triton.jit
def tiled_rope_pack(
    row, weight, cosine, sine, out, batch, token, num_tokens, num_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A row of heads times a weight, rotated, -> `out`, [batch, num_heads, num_tokens, head size]; 64-bit `batch`."""
    size = 2 * PAIRS_PER_HEAD
    head_stride = tl.cast(num_tokens, tl.int64) * size
    for tile in tl.static_range(TILES):
        first = tile * TILE
        at = row + first * size
        a, b = load_heads(at, num_heads - first, PAIRS_PER_HEAD, PAIRS, TILE, INTERLEAVED)
        weight_a, weight_b = load_heads(
            weight + first * size, num_heads - first, PAIRS_PER_HEAD, PAIRS, TILE, INTERLEAVED
        )
        a *= weight_a
        b *= weight_b
        packed = out + (batch * num_heads + first) * head_stride + token * size
        store_heads(
            a * cosine - b * sine, b * cosine + a * sine, packed, head_stride, num_heads - first,
            PAIRS_PER_HEAD, PAIRS, TILE, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def qk_exchange_many_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, state, num_rows, num_tokens, q_batch, q_token, k_batch, k_token,
    q_heads, k_heads, q_count, k_count, eps,
    NUM_RANKS: tl.constexpr, PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
    Q_TILES: tl.constexpr, K_TILES: tl.constexpr, INTERLEAVED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Every program takes the rows index, index + number of programs, ... in order, and reads q and k of each twice.

    The second time they are in the first cache. Small programs, of which many fit, have no heads that are not there.
    """
    row = tl.program_id(0)
    while row < num_rows:
        batch = (row // num_tokens).to(tl.int64)
        token = (row % num_tokens).to(tl.int64)
        q_row = q + batch * q_batch + token * q_token
        k_row = k + batch * k_batch + token * k_token
        tag = begin(state, row, NUM_RANKS)
        q_sum = tiled_sum(q_row, q_heads, PAIRS_PER_HEAD, PAIRS, TILE, Q_TILES, INTERLEAVED)
        k_sum = tiled_sum(k_row, k_heads, PAIRS_PER_HEAD, PAIRS, TILE, K_TILES, INTERLEAVED)
        publish_pair(state, row, tag, q_sum, k_sum, NUM_RANKS, INTERPRETED)
        cosine, sine = load_tables(cos, sin, token, PAIRS_PER_HEAD, PAIRS)
        q_sum, k_sum = sum_of_pairs(state, row, tag, NUM_RANKS, INTERPRETED)
        q_inverse = tl.rsqrt(q_sum / q_count + eps)
        k_inverse = tl.rsqrt(k_sum / k_count + eps)
        tiled_rope_pack(
            q_row, q_weight, cosine * q_inverse, sine * q_inverse, q_out, batch, token, num_tokens, q_heads,
            PAIRS_PER_HEAD, PAIRS, TILE, Q_TILES, INTERLEAVED,
        )  # fmt: skip
        tiled_rope_pack(
            k_row, k_weight, cosine * k_inverse, sine * k_inverse, k_out, batch, token, num_tokens, k_heads,
            PAIRS_PER_HEAD, PAIRS, TILE, K_TILES, INTERLEAVED,
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
    arguments = (
        q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR.contiguous(), sin_SR.contiguous(), q_BhSE, k_BgSE, state,
        num_rows, num_tokens, *q_BSd.stride()[:2], *k_BSc.stride()[:2], q_heads, k_heads, q_count, k_count, eps,
    )  # fmt: skip
    constants = {
        "NUM_RANKS": num_ranks, "PAIRS_PER_HEAD": pairs, "PAIRS": block_of(pairs), "INTERLEAVED": interleaved,
        "INTERPRETED": is_interpreted(),
    }  # fmt: skip
    if 0 < num_rows <= _FEW_PER_SM * num_programs:
        qk_exchange_kernel[(num_rows,)](
            *arguments, **constants, Q_HEADS=block_of(q_heads), K_HEADS=block_of(k_heads), **_FEW
        )
    elif num_rows:
        tile = min(max(_TILE_PAIRS // block_of(pairs), 1), block_of(max(q_heads, k_heads)))
        tiles = {"TILE": tile, "Q_TILES": triton.cdiv(q_heads, tile), "K_TILES": triton.cdiv(k_heads, tile)}
        qk_exchange_many_kernel[(min(num_rows, _MANY_PER_SM * num_programs),)](
            *arguments, **constants, **tiles, **_MANY
        )
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
