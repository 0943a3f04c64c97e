"""Rows of 4-byte values on every rank -> the same rows of all ranks, within one kernel, through each other's memory.

A rank owns 2 * num_ranks * num_rows * row_words words of 8 bytes, which its peers write. The epoch of a row is counted
on the device, so a kernel that is replayed by a CUDA graph goes on counting; it wraps at 2^32, when no word of the
epoch before is left.

**Words** (`publish_pair`, `sum_of_pairs`; `publish_words`, `wait_words`), for a pair of values or a few rows. The upper
half of a word is the epoch, the lower half a value. An aligned access of 8 bytes is single-copy atomic, also as an
element of a vector access, so a value is there exactly when its epoch is: there is no second location that the epoch
would have to release, and no fence, release or acquire is needed. All accesses to words are strong and of system scope
(`st.relaxed.sys`, and `ld.relaxed.sys` or `ld.volatile`, which PTX defines to synchronise like it), so writer and
reader are no data race, and a poll sees a write after a finite time. Neighbouring words of a row belong to neighbouring
threads, so that the stores of a warp are few packets.

**Rows** (`publish_row`, `wait_row`), for many values, which lie densely: half as many bytes. The last word of a row is
a flag with the epoch. All threads write values by weak stores and meet at the barrier of the program. Then one writes
the flag, by a release of system scope, which orders the stores of the others too: a barrier is part of causality order,
and a release is cumulative. Every thread that reads values has seen the flag by an acquire of its own. So accesses of
values never race. An exchange is for one op and one of these forms, or a value could be taken for a word.

**Two slots.** Words of even and of odd epochs are apart. A rank may write epoch e + 2 over e when its peer has read e:
the rank has left the kernel of e + 1, in which it saw the peer's word of e + 1; the peer wrote that in its kernel of
e + 1, which the stream began after its kernel of e had ended, with every read of e. So no rank is two epochs ahead of
another. With one slot the same holds no longer: a rank that has seen e of all may write e + 1 before a slow peer has
read e. Kernels of one exchange must not overlap: one stream (or streams that wait for each other), and no programmatic
dependent launch.

**One decision.** Threads that poll for themselves may see a word come at different times. What a warp decides by in
`sum_of_pairs` is a sum over all threads that poll, which holds each word once. In `wait_words` and `wait_row` each
thread decides for itself: nothing waits for other threads between its polls. What did not come is NaN in the sum over
the row, which is equal in all threads, and only then are the late ranks looked for.

**No deadlock.** A program publishes a row before it waits for it, and takes its rows (index, index + num_programs, ...)
in order. Of all rows that some rank has not finished take the first: its programs have finished all their rows before
it, so each has published it, or will without waiting; so all finish it. This needs every program of a grid to become
resident without one of the same grid ending, hence a limit on the grid, whatever the number of rows, and on the
registers of a thread, by which a multiprocessor holds a known number of programs; all ranks must pass the same
`num_programs`. A larger grid is safe only where programs are issued in order of their index, which CUDA does not
promise.

**Bounded.** A wait polls at most `max_polls` times. Then the ranks and the epoch that it waited for are kept, the value
is NaN, and this and every later kernel of the exchange goes on without polling, until `Exchange.check` raises.

What is different on every rank (its number, the addresses) is data, so that all ranks run the same kernels. NVLink
multicast is not used.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places in `exchange_memory.Exchange.state`, int64: numbers, addresses of the words of all ranks, epochs of all rows.
_RANK = tl.constexpr(0)
_MAX_POLLS = tl.constexpr(1)
_LATE = tl.constexpr(2)
"""0, or the first wait that ran out of polls: epoch << 32 | a bit for each rank that did not arrive."""
_NUM_ROWS = tl.constexpr(3)
_ROW_WORDS = tl.constexpr(4)
_ADDRESSES = tl.constexpr(5)
_WARP = tl.constexpr(32)
WORDS_AT_ONCE = 2
"""Words of a thread that `wait_words` reads together."""


@triton.jit
def begin(state, row, NUM_RANKS: tl.constexpr):
    """Upper half of the words of this exchange of a row, in place."""
    epoch = tl.load(state + _ADDRESSES + NUM_RANKS + row) + 1
    return epoch.to(tl.uint64) << 32


@triton.jit
def end(state, row, tag, NUM_RANKS: tl.constexpr):
    """Count the exchange of a row, once all threads of the program have read its epoch."""
    tl.debug_barrier()
    tl.store(state + _ADDRESSES + NUM_RANKS + row, (tag >> 32).to(tl.int64))


@triton.jit
def row_of(state, owner, source, row, tag, NUM_RANKS: tl.constexpr):
    """Where rank `source` writes a row into the memory of rank `owner`."""
    slot = ((tag >> 32) & 1).to(tl.int64)
    rows = (slot * NUM_RANKS + source) * tl.load(state + _NUM_ROWS) + row
    address = tl.load(state + _ADDRESSES + owner)
    return address.to(tl.pointer_type(tl.uint64)) + rows * tl.load(state + _ROW_WORDS)


@triton.jit
def store_words(at, words, mask, INTERPRETED: tl.constexpr):
    """Relaxed stores of system scope, which Triton has only as exchanges; those wait for the old value over NVLink."""
    if INTERPRETED:
        tl.atomic_xchg(at, words, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $3, 0;
            @wanted st.relaxed.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r", [at, words, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def is_late(words, tag):
    """True for words that have not come."""
    return (words >> 32) != (tag >> 32)


@triton.jit
def polls_of(state):
    """How often a row may poll; and whether a wait of this exchange has run out, so that it need not."""
    return tl.load(state + _MAX_POLLS), tl.load(state + _LATE, volatile=True) == 0


@triton.jit
def poll(at, mask, tag, polls, is_whole):
    """Words, once all have the epoch of `tag` or the polls are used up; how many it still waits for; the polls left.

    Unless `is_whole`, words are taken as they are. Threads may have read different values of it, so it is summed up.
    """
    words = tl.load(at, mask=mask, other=tag, volatile=True)
    missing = tl.sum((is_whole & is_late(words, tag)).to(tl.int32))
    while (missing > 0) & (polls > 0):
        words = tl.load(at, mask=mask, other=tag, volatile=True)
        missing = tl.sum((is_whole & is_late(words, tag)).to(tl.int32))
        polls -= 1
    return words, missing, polls


def _wait_asm(count: int) -> str:
    """PTX that reads `count` words until all have the epoch of a tag, or the polls are used up.

    Its operands are their values and in what their epochs differ, the addresses, a tag and the polls for each.
    """
    words = [f"word{index}" for index in range(count)]
    loads = [f"ld.relaxed.sys.global.b64 {word}, [${2 * count + index}];" for index, word in enumerate(words)]
    halves = [f"mov.b64 {{${index}, ${count + index}}}, {word};" for index, word in enumerate(words)]
    compared = [f"xor.b32 ${count + index}, ${count + index}, epoch;" for index in range(count)]
    joined = [f"or.b32 any, any, ${count + index};" for index in range(count)]
    return f"""{{
        .reg .pred more;
        .reg .b64 left, {", ".join(words)};
        .reg .b32 any, epoch;
        mov.b64 {{any, epoch}}, ${3 * count};
        mov.b64 left, ${4 * count};
        again:
        {" ".join(loads + halves + compared)}
        mov.b32 any, 0;
        {" ".join(joined)}
        sub.s64 left, left, 1;
        setp.ge.s64 more, left, 0;
        setp.ne.and.b32 more, any, 0, more;
        @more bra again;
    }}"""


_WAIT_ASM = tl.constexpr(_wait_asm(WORDS_AT_ONCE))
_WAIT_OPERANDS = tl.constexpr(",".join(2 * WORDS_AT_ONCE * ["=&r"] + 3 * WORDS_AT_ONCE * ["l"]))
_WAIT_PACK = tl.constexpr(WORDS_AT_ONCE)


@triton.jit
def wait_words(at, tag, polls, INTERPRETED: tl.constexpr):
    """Values of the words at `at`, once they have the epoch of `tag` or the polls are used up; which are late.

    Every thread waits for its own words, WORDS_AT_ONCE of them at a time, and must have a multiple of that.
    """
    if INTERPRETED:
        words = tl.load(at, volatile=True)
        while tl.sum((is_late(words, tag) & (polls > 0)).to(tl.int32)) > 0:
            words = tl.load(at, volatile=True)
            polls -= 1
        values = lower(words)
        late = is_late(words, tag)
    else:
        values, difference = tl.inline_asm_elementwise(
            _WAIT_ASM, _WAIT_OPERANDS, [at, tag, polls], dtype=(tl.uint32, tl.uint32), is_pure=False, pack=_WAIT_PACK
        )
        late = difference != 0
    return values, late


@triton.jit
def keep_late(state, ranks, tag, INTERPRETED: tl.constexpr):
    """The first wait that runs out is kept, in whichever thread: a bit for each rank that it was for."""
    late = tag.to(tl.int64, bitcast=True) | ranks
    if INTERPRETED:
        tl.atomic_cas(state + _LATE, tl.full([], 0, tl.int64), late)
    else:
        tl.inline_asm_elementwise(
            "atom.relaxed.sys.global.cas.b64 $0, [$1], 0, $2;",
            "=l,l,l", [state + _LATE, late], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def bits(value):
    """float32 -> the lower half of a word."""
    return value.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def lower(words):
    """The lower halves."""
    return (words & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def publish_pair(state, row, tag, first, second, NUM_RANKS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Write two float32 of a row into the memory of all ranks, this one too."""
    at = tl.arange(0, _WARP)
    which = at % 2
    mask = at < 2 * NUM_RANKS
    owners = tl.where(mask, at // 2, 0)
    place = row_of(state, owners, tl.load(state + _RANK), row, tag, NUM_RANKS) + which
    store_words(place, tag | bits(tl.where(which == 0, first, second)), mask, INTERPRETED)


@triton.jit
def values_of(state, owner, source, row, tag, NUM_RANKS: tl.constexpr):
    """Where rank `source` writes the values of a row into the memory of rank `owner`."""
    place = row_of(state, owner, source, row, tag, NUM_RANKS)
    return tl.multiple_of(place.to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def flag_of(state, owner, source, row, tag, NUM_RANKS: tl.constexpr):
    """And the word that says that they are there."""
    return row_of(state, owner, source, row, tag, NUM_RANKS) + tl.load(state + _ROW_WORDS) - 1


@triton.jit
def publish_row(state, row, tag, values, at, mask, NUM_RANKS: tl.constexpr):
    """Write the values of a row into the memory of every peer, then its flag."""
    rank = tl.load(state + _RANK)
    for owner in tl.static_range(NUM_RANKS):
        if owner != rank:
            tl.store(values_of(state, owner, rank, row, tag, NUM_RANKS) + at, values, mask=mask)
    tl.debug_barrier()
    for owner in tl.static_range(NUM_RANKS):
        if owner != rank:
            tl.atomic_xchg(flag_of(state, owner, rank, row, tag, NUM_RANKS), tag, sem="release", scope="sys")


@triton.jit
def publish_words(state, row, tag, values, at, mask, NUM_RANKS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Write the values of a row into the memory of every peer, each with its epoch."""
    rank = tl.load(state + _RANK)
    for owner in tl.static_range(NUM_RANKS):
        if owner != rank:
            place = row_of(state, owner, rank, row, tag, NUM_RANKS)
            store_words(place + at, tag | values.to(tl.uint64), mask, INTERPRETED)


@triton.jit
def acquire(at, INTERPRETED: tl.constexpr):
    """A word, by every thread for itself."""
    if INTERPRETED:
        word = tl.load(at, volatile=True)
    else:
        word = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [at], dtype=tl.uint64, is_pure=False, pack=1
        )
    return word


@triton.jit
def wait_row(state, source, row, tag, polls, NUM_RANKS: tl.constexpr, INTERPRETED: tl.constexpr):
    """True when the polls are used up and the values of rank `source` have not come; the polls left."""
    flag = flag_of(state, tl.load(state + _RANK), source, row, tag, NUM_RANKS)
    word = acquire(flag, INTERPRETED)
    while is_late(word, tag) & (polls > 0):
        word = acquire(flag, INTERPRETED)
        polls -= 1
    return is_late(word, tag), polls


@triton.jit
def ranks_of(late, word):
    """A bit for each rank of which one of its two words is late."""
    ranks = tl.where(late, 1 << (word // 2), 0)
    return (tl.sum(tl.where(word % 2 == 0, ranks, 0)) | tl.sum(tl.where(word % 2 == 1, ranks, 0))).to(tl.int64)


@triton.jit
def sum_of_pairs(state, row, tag, NUM_RANKS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Sums over all ranks of what they published; the same bits on all ranks, which add in the same order.

    One word for each thread of a warp: every warp polls all words for itself, and nothing waits for other warps.
    """
    at = tl.arange(0, _WARP)
    mask = at < 2 * NUM_RANKS
    place = row_of(state, tl.load(state + _RANK), tl.where(mask, at // 2, 0), row, tag, NUM_RANKS) + at % 2
    polls, is_whole = polls_of(state)
    words, missing, _polls = poll(place, mask, tag, polls, is_whole)
    late = is_late(words, tag)
    if missing > 0:
        keep_late(state, ranks_of(late, at), tag, INTERPRETED)
    values = tl.where(late, float("nan"), lower(words).to(tl.float32, bitcast=True))
    first = tl.sum(tl.where(mask & (at % 2 == 0), values, 0.0))
    second = tl.sum(tl.where(mask & (at % 2 == 1), values, 0.0))
    return first, second
