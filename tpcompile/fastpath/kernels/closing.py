"""A rank that refuses a call -> peers that no longer wait for it, without a change of the kernels that wait.

A wait ends when the words of its epoch are there. So the rank writes the words of its next exchange itself, of every
row, with NaN as their values: a peer that waits in that exchange, or begins it later, goes on with NaN. Before that it
sets `_LATE` in the state of every rank, its own too, as if a wait had run out there: no later kernel of the exchange
polls, and `Exchange.check` raises. The first who sets it is kept, a wait that ran out or a rank that refused.

**Order.** A peer that has seen a word begins its next kernel after that, and reads `_LATE` there: the word is released
behind the exchange that set it, both at system scope. A peer that is still in an earlier exchange may see `_LATE`
before words that are under way from a third rank, and computes with NaN too.

**Which words.** Those of epoch e + 1, e being what this rank has counted: it runs behind its own kernels, and no peer
is further than e + 1. The slot is free, as it is for any kernel of e + 1 (see `exchange`). Rows that go out densely end
by their flag; a value in two is NaN there, which is enough for a norm.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import peers
from tpcompile.fastpath.kernels.exchange import _ADDRESSES, _LATE, _NUM_ROWS, _RANK, _ROW_WORDS, begin, row_of
from tpcompile.fastpath.kernels.op import exchange_op

REFUSED_AT = 16
"""First of the bits of `_LATE` for ranks that refused; below are those of ranks that did not arrive."""
_REFUSED_AT = tl.constexpr(REFUSED_AT)
_NAN = tl.constexpr(0x7FFF7FFF)
"""Bits of a NaN in float32, and of two in bfloat16 and in float16."""
_BLOCK = 512


@triton.jit
def close_kernel(state, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row of the exchange."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.load(state + _RANK)
    row_words = tl.load(state + _ROW_WORDS)
    tag = begin(state, row, NUM_RANKS)
    refused = begin(state, 0, NUM_RANKS).to(tl.int64, bitcast=True) | (tl.full([], 1, tl.int64) << (rank + _REFUSED_AT))
    num_words = 2 * NUM_RANKS * tl.load(state + _NUM_ROWS) * row_words
    for owner in tl.static_range(NUM_RANKS):
        behind_words = tl.load(state + _ADDRESSES + owner) + 8 * num_words
        late = behind_words.to(tl.pointer_type(tl.int64)) + _LATE
        tl.atomic_cas(late, tl.full([], 0, tl.int64), refused, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    for owner in tl.static_range(NUM_RANKS):
        if owner != rank:
            place = row_of(state, owner, rank, row, tag, NUM_RANKS)
            first = tl.full([], 0, tl.int64)
            while first < row_words:
                at = first + tl.arange(0, BLOCK)
                words = (tag | _NAN) + tl.zeros([BLOCK], tl.uint64)
                tl.atomic_xchg(place + at, words, mask=at < row_words, sem="release", scope="sys")
                first += BLOCK


def close(state: Tensor, *, num_ranks: int, num_rows: int) -> None:
    """Launch it for the state of an exchange, which lies behind the words of its rank, as that of every peer does."""
    close_kernel[(num_rows,)](state, NUM_RANKS=num_ranks, BLOCK=_BLOCK)


@exchange_op("tpcompile::refused_call")
def refused_call(state: Tensor, text: str) -> None:
    """Raise FastPathError, for the peers too: in the place of a call that was found wrong while it was compiled."""
    with peers.launching(state):
        raise FastPathError(text)


@refused_call.register_fake
def _(state: Tensor, text: str) -> None:
    return
