"""All-reduce of a row-parallel output, residual add and RMSNorm in one kernel.

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
    WORDS_AT_ONCE,
    begin,
    end,
    keep_late,
    polls_of,
    publish_row,
    publish_words,
    row_of,
    values_of,
    wait_row,
    wait_words,
)
from tpcompile.fastpath.kernels.exchange_memory import Exchange
from tpcompile.fastpath.kernels.op import DTYPES, block_of, check_rows, exchange_op, is_interpreted
from tpcompile.fastpath.registry import TpSupport

_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LEAST_BLOCK = 128
_VALUES_PER_THREAD = 8
"""Values of 4 bytes, where every program has one row; twice as many where rows wait for programs."""
_FEW_ROWS = 32
"""Rows up to which they go out as words: half as fast per byte, and without waiting for a flag. On two H200 both
took the same time for 64 rows of 5120."""
_THREADS_PER_SM = 512
_MOST_THREADS = 1024
"""Threads of a program whose row goes out as words: one that has fewer words waits for fewer one after the other."""
_REGISTERS_PER_SM = 65_536
_MAX_REGISTERS = 128
"""Registers of a thread, so that a multiprocessor holds _THREADS_PER_SM of them."""


@triton.jit
def unpack(values, DTYPE: tl.constexpr):
    """Elements in 4 bytes, in float32: two of 2 bytes, or one of 4 and zero."""
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
    """Of 4 bytes each, as bits."""
    return tl.load(row + at, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def sum_of_rows(
    state, row, tag, own, at, mask, NUM_RANKS: tl.constexpr, DTYPE: tl.constexpr, AS_WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """This rank's row and those of its peers, added in the order of the ranks.

    And for each value, a bit for each rank of which it did not come; the sum is meaningless there.
    """
    rank = tl.load(state)
    max_polls, is_whole = polls_of(state)
    polls = tl.where(is_whole, max_polls, 0)
    if AS_WORDS:
        polls += tl.zeros_like(own).to(tl.int64)
    late_ranks = tl.zeros_like(own).to(tl.int32)
    first, second = unpack(tl.zeros_like(own), DTYPE)
    for source in tl.static_range(NUM_RANKS):
        more_first, more_second = unpack(own, DTYPE)
        if source != rank:
            if AS_WORDS:
                place = row_of(state, rank, source, row, tag, NUM_RANKS) + tl.where(mask, at, 0)
                values, late = wait_words(place, tag, polls, INTERPRETED)
                polls = tl.where(late, 0, polls)
            else:
                late, polls = wait_row(state, source, row, tag, polls, NUM_RANKS, INTERPRETED)
                values = tl.load(values_of(state, rank, source, row, tag, NUM_RANKS) + at, mask=mask, other=0)
            late_ranks |= tl.where(late, 1 << source, 0)
            more_first, more_second = unpack(values, DTYPE)
        first += more_first
        second += more_second
    return first, second, late_ranks


@triton.jit
def either(a, b):
    """Bits of both."""
    return a | b


@triton.jit
def all_reduce_norm_row(
    partial, x, weight, total, out, state, row, num_values, width, eps,
    NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, AS_WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One token, in values of 4 bytes; `row` must be 64-bit."""
    at = tl.arange(0, BLOCK)
    if AS_WORDS:
        at = tl.max_contiguous(at, 1)  # neighbours are in neighbouring threads, whose stores go out together
    mask = at < num_values
    own = load_values(partial + row * num_values, at, mask)
    tag = begin(state, row, NUM_RANKS)
    if AS_WORDS:
        publish_words(state, row, tag, own, at, mask, NUM_RANKS, INTERPRETED)
    else:
        publish_row(state, row, tag, own, at, mask, NUM_RANKS)
    x_first, x_second = unpack(load_values(x + row * num_values, at, mask), DTYPE)
    weight_first, weight_second = unpack(load_values(weight, at, mask), DTYPE)
    first, second, late_ranks = sum_of_rows(
        state, row, tag, own, at, mask, NUM_RANKS, DTYPE, AS_WORDS, INTERPRETED
    )  # fmt: skip
    rounded = pack(first + x_first, second + x_second, DTYPE)
    first, second = unpack(rounded, DTYPE)
    squares = tl.where(late_ranks == 0, first * first + second * second, float("nan"))
    squares = tl.sum(tl.where(mask, squares, 0.0))
    if squares != squares:
        late = tl.reduce(late_ranks, 0, either)
        if late != 0:
            keep_late(state, late, tag, INTERPRETED)
        nothing = tl.full(first.shape, float("nan"), tl.float32)
        rounded = tl.where(late_ranks == 0, rounded, pack(nothing, nothing, DTYPE))
    tl.store(total + row * num_values + at, rounded.to(tl.int32, bitcast=True), mask=mask)
    inverse = tl.rsqrt(squares / width + eps)
    normed = pack(first * inverse * weight_first, second * inverse * weight_second, DTYPE)
    tl.store(out + row * num_values + at, normed.to(tl.int32, bitcast=True), mask=mask)
    end(state, row, tag, NUM_RANKS)


@triton.jit
def all_reduce_norm_kernel(
    partial, x, weight, total, out, state, num_rows, num_values, width, eps,
    NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, AS_WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program has one row (token) that goes out as words, or takes the rows index, index + number of programs, ..."""
    row = tl.program_id(0).to(tl.int64)
    if AS_WORDS:  # in a loop, 8 rows of 5120 take 4.4 us instead of 4.1, on two H200
        all_reduce_norm_row(
            partial, x, weight, total, out, state, row, num_values, width, eps,
            NUM_RANKS, BLOCK, DTYPE, AS_WORDS, INTERPRETED,
        )  # fmt: skip
    else:
        while row < num_rows:
            all_reduce_norm_row(
                partial, x, weight, total, out, state, row, num_values, width, eps,
                NUM_RANKS, BLOCK, DTYPE, AS_WORDS, INTERPRETED,
            )  # fmt: skip
            row += tl.num_programs(0)


@exchange_op("tpcompile::all_reduce_norm")
def all_reduce_norm(
    partial_D: Tensor,
    x_D: Tensor,
    weight_D: Tensor,
    state: Tensor,
    num_ranks: int,
    num_programs: int,
    eps: float,
    as_words: bool,
) -> tuple[Tensor, Tensor]:
    """[..., D], [..., D], [D] -> x + the sum of all ranks' partial, and its norm times the weight.

    `state`, `num_ranks` and `num_programs` are those of an Exchange, `as_words` is `sends_words` of it.
    Raises FastPathError for element types, shapes, strides and devices that it cannot take.
    """
    check_rows("all_reduce_norm", partial=partial_D, x=x_D, weight=weight_D)
    _check_shapes(partial_D, x_D, weight_D)
    width = x_D.shape[-1]
    num_values = width * x_D.itemsize // 4
    total_D, out_D = (torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device) for _ in range(2))
    num_rows = x_D.shape[:-1].numel()
    block = max(block_of(num_values), _LEAST_BLOCK)
    num_threads = _num_threads(block, as_words=as_words, is_a_row_each=num_rows <= num_programs)
    per_sm = max(1, _THREADS_PER_SM // num_threads)
    if x_D.numel():
        all_reduce_norm_kernel[(min(num_rows, per_sm * num_programs),)](
            _dense(partial_D), _dense(x_D), _dense(weight_D), _dense(total_D), _dense(out_D), state, num_rows,
            num_values, width, eps, NUM_RANKS=num_ranks, BLOCK=block, DTYPE=_TL_DTYPES[x_D.dtype],
            AS_WORDS=as_words, INTERPRETED=is_interpreted(), num_warps=num_threads // 32,
            maxnreg=min(_MAX_REGISTERS, _REGISTERS_PER_SM // num_threads),
        )  # fmt: skip
    return total_D, out_D


@all_reduce_norm.register_fake
def _(partial: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def words_of(width: int, dtype: torch.dtype, num_rows: int) -> int:
    """Words of 8 bytes of a row, what an Exchange for so many rows of this width needs; an even number.

    The values, and 16 bytes with a flag behind them; or a word for every 4 bytes of few rows.
    """
    size = width * dtype.itemsize
    dense = 2 * triton.cdiv(size, 16) + 2
    return max(dense, 2 * triton.cdiv(size, 8)) if num_rows <= _FEW_ROWS else dense


def sends_words(exchange: Exchange) -> bool:
    """True when its rows go out as words: few of them, with a program for each. It does not depend on the call."""
    return exchange.num_rows <= min(_FEW_ROWS, exchange.num_programs)


def _num_threads(block: int, *, as_words: bool, is_a_row_each: bool) -> int:
    if as_words:
        return min(_MOST_THREADS, block // WORDS_AT_ONCE)
    per_thread = _VALUES_PER_THREAD if is_a_row_each else 2 * _VALUES_PER_THREAD
    return min(_THREADS_PER_SM, max(_LEAST_BLOCK, block // per_thread))


def _dense(x_D: Tensor) -> Tensor:
    """[..., D] -> [..., D] of int32, of half the width for elements of 2 bytes."""
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
    """As `plain.all_reduce_add_rms_norm`, in one kernel.

    `exchange` is for `n` rows of `words_of(D, dtype, n)`, at least as many as there are tokens. The sum over the ranks
    is not rounded before x is added to it.
    """
    row_words = words_of(x_D.shape[-1], x_D.dtype, exchange.num_rows)
    exchange.check_call("all_reduce_add_rms_norm", x_D, row_words)
    return all_reduce_norm(
        partial_D, x_D, weight_D, exchange.state, exchange.num_ranks, exchange.num_programs, eps, sends_words(exchange)
    )
