"""All-reduce of a row-parallel output, residual add and RMSNorm in one kernel, for small messages.

One shot: every rank writes its partial rows into the memory of its peers and adds up theirs, in the order of the ranks
and in float32, so that all ranks have the same bits. For inference: it has no backward.
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
from tpcompile.fastpath.kernels.exchange import (
    Exchange,
    begin,
    end,
    is_late,
    keep_late,
    lower,
    poll,
    polls_of,
    row_of,
    store_words,
)  # fmt: skip
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_rows, exchange_op, is_interpreted
from tpcompile.fastpath.registry import TpSupport

_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LEAST_BLOCK = 128
"""Threads of the smallest program: each word of a row is polled by one thread."""
_WORDS_PER_THREAD = 8
_MAX_REGISTERS = 128
"""Of a thread, so that a multiprocessor holds the largest program, of 512 threads."""


@triton.jit
def unpack(values, DTYPE: tl.constexpr):
    """Values of a word in float32: two of 2 bytes, or one of 4 and zero."""
    if tl.float32 == DTYPE:
        first = values.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    else:
        first = (values & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        second = (values >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def pack(first, second, DTYPE: tl.constexpr):
    """`unpack` turned round."""
    if tl.float32 == DTYPE:
        values = first.to(tl.uint32, bitcast=True)
    else:
        values = first.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        values |= second.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return values


@triton.jit
def load_values(row, at, mask):
    """Values of words, as bits."""
    return tl.load(row + at, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def publish_row(state, row, tag, values, at, mask, NUM_RANKS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Write a row into the memory of every peer."""
    rank = tl.load(state)
    words = tag | values.to(tl.uint64)
    for owner in tl.static_range(NUM_RANKS):
        if owner != rank:
            store_words(row_of(state, owner, rank, row, tag, NUM_RANKS) + at, words, mask, INTERPRETED)


@triton.jit
def sum_of_rows(
    state, row, tag, own, at, mask, NUM_RANKS: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """This rank's row and those of its peers, added in the order of the ranks; NaN where a rank did not arrive."""
    rank = tl.load(state)
    polls, is_whole = polls_of(state)
    late_ranks = tl.full([], 0, tl.int32)
    first, second = unpack(tl.zeros_like(own), DTYPE)
    for source in tl.static_range(NUM_RANKS):
        more_first, more_second = unpack(own, DTYPE)
        if source != rank:
            place = row_of(state, rank, source, row, tag, NUM_RANKS) + at
            words, missing, polls = poll(place, mask, tag, polls, is_whole)
            late = is_late(words, tag)
            late_ranks |= tl.where(missing > 0, 1 << source, 0)
            more_first, more_second = unpack(lower(words), DTYPE)
            more_first = tl.where(late, float("nan"), more_first)
            more_second = tl.where(late, float("nan"), more_second)
        first += more_first
        second += more_second
    if late_ranks != 0:
        keep_late(state, late_ranks.to(tl.int64), tag, INTERPRETED)
    return first, second


@triton.jit
def all_reduce_norm_kernel(
    partial, x, weight, total, out, state, num_rows, row_words, width, eps,
    NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Every program takes the rows (tokens) index, index + number of programs, ... in order; tensors are of words."""
    at = tl.arange(0, BLOCK)
    mask = at < row_words
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:
        own = load_values(partial + row * row_words, at, mask)
        tag = begin(state, row, NUM_RANKS)
        publish_row(state, row, tag, own, at, mask, NUM_RANKS, INTERPRETED)
        x_first, x_second = unpack(load_values(x + row * row_words, at, mask), DTYPE)
        weight_first, weight_second = unpack(load_values(weight, at, mask), DTYPE)
        first, second = sum_of_rows(state, row, tag, own, at, mask, NUM_RANKS, DTYPE, INTERPRETED)
        rounded = pack(first + x_first, second + x_second, DTYPE)
        tl.store(total + row * row_words + at, rounded.to(tl.int32, bitcast=True), mask=mask)
        first, second = unpack(rounded, DTYPE)
        squares = tl.sum(tl.where(mask, first * first + second * second, 0.0))
        inverse = tl.rsqrt(squares / width + eps)
        normed = pack(first * inverse * weight_first, second * inverse * weight_second, DTYPE)
        tl.store(out + row * row_words + at, normed.to(tl.int32, bitcast=True), mask=mask)
        end(state, row, tag, NUM_RANKS)
        row += tl.num_programs(0)


@exchange_op("tpcompile::all_reduce_norm")
def all_reduce_norm(
    partial_D: Tensor, x_D: Tensor, weight_D: Tensor, state: Tensor, num_ranks: int, num_programs: int, eps: float
) -> tuple[Tensor, Tensor]:
    """[..., D], [..., D], [D] -> x + the sum of all ranks' partial, and its norm times the weight.

    `state`, `num_ranks` and `num_programs` are those of an Exchange. Raises FastPathError for element types, shapes,
    strides and devices that it cannot take.
    """
    check_rows("all_reduce_norm", partial=partial_D, x=x_D, weight=weight_D)
    _check_shapes(partial_D, x_D, weight_D)
    width = x_D.shape[-1]
    row_words = words_of(width, x_D.dtype)
    total_D, out_D = (torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device) for _ in range(2))
    num_rows = x_D.shape[:-1].numel()
    block = max(block_of(row_words), _LEAST_BLOCK)
    if x_D.numel():
        all_reduce_norm_kernel[(min(num_rows, num_programs),)](
            _as_words(partial_D), _as_words(x_D), _as_words(weight_D), _as_words(total_D), _as_words(out_D), state,
            num_rows, row_words, width, eps, NUM_RANKS=num_ranks, BLOCK=block,
            DTYPE=_TL_DTYPES[x_D.dtype], INTERPRETED=is_interpreted(), num_warps=_num_warps(block),
            maxnreg=_MAX_REGISTERS,
        )  # fmt: skip
    return total_D, out_D


@all_reduce_norm.register_fake
def _(partial: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def words_of(width: int, dtype: torch.dtype) -> int:
    """Words of a row: what an Exchange for rows of this width needs."""
    return width * dtype.itemsize // 4


def _num_warps(block: int) -> int:
    return min(16, max(_LEAST_BLOCK // 32, block // (32 * _WORDS_PER_THREAD)))


def _as_words(x_D: Tensor) -> Tensor:
    """Dense, [..., D] -> [..., words] of int32."""
    dense_D = x_D.contiguous()
    if dense_D.storage_offset() % 2:
        dense_D = dense_D.clone()
    return dense_D.view(torch.int32)


def _check_shapes(partial_D: Tensor, x_D: Tensor, weight_D: Tensor) -> None:
    for name, tensor, shape in (("partial", partial_D, x_D.shape), ("weight", weight_D, x_D.shape[-1:])):
        if tensor.shape != shape:
            raise FastPathError(f"all_reduce_norm: {name} is {list(tensor.shape)}, and {list(shape)} is needed")
        if tensor.dtype != x_D.dtype:
            raise FastPathError(f"all_reduce_norm: {name} is {tensor.dtype} and x {x_D.dtype}; they must be equal")
    if x_D.shape[-1] % 2:
        raise FastPathError(f"all_reduce_norm: x is {x_D.shape[-1]} wide; pad it to an even number")


@fast_path(
    "all_reduce_add_rms_norm",
    replaces=plain.all_reduce_add_rms_norm,
    tp=TpSupport.DISTRIBUTED_STATS,
    dtypes=DTYPES,
)
def all_reduce_add_rms_norm(
    x_D: Tensor, partial_D: Tensor, weight_D: Tensor, *, eps: float, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """As `plain.all_reduce_add_rms_norm`, in one kernel; `exchange` has a row of `words_of(D, dtype)` for each token.

    The sum over the ranks is not rounded before x is added to it.
    """
    exchange.check_call("all_reduce_add_rms_norm", x_D, words_of(x_D.shape[-1], x_D.dtype))
    return all_reduce_norm(partial_D, x_D, weight_D, exchange.state, exchange.num_ranks, exchange.num_programs, eps)
