"""Device functions of the norms: one token's heads as a tile of rotary pairs, normalised, weighted, rotated, packed.

A tile is [HEADS, PAIRS] twice: the first and the second element of every rotary pair. The pairs of a head are elements
i and i + PAIRS_PER_HEAD, or 2i and 2i + 1 when INTERLEAVED. Ranges are padded to powers of two and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_offsets(
    num_heads, head_stride,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Places of the elements of heads that are `head_stride` apart, and which are there.

    All elements, [HEADS, 2 * PAIRS], when INTERLEAVED; else the first one of each pair, [HEADS, PAIRS].
    """
    heads = tl.arange(0, HEADS)[:, None]
    if INTERLEAVED:
        elements = tl.arange(0, 2 * PAIRS)[None, :]
        size = 2 * PAIRS_PER_HEAD
    else:
        elements = tl.arange(0, PAIRS)[None, :]
        size = PAIRS_PER_HEAD
    return heads * head_stride + elements, (heads < num_heads) & (elements < size)


@triton.jit
def load_heads(
    row, num_heads, PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both elements of all pairs of a row of heads, in float32, [HEADS, PAIRS] each; zero beyond them.

    Interleaved pairs are loaded as whole heads and split: loads of every other element took 15 times as long.
    """
    at, mask = head_offsets(num_heads, 2 * PAIRS_PER_HEAD, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    if INTERLEAVED:
        both = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (HEADS, PAIRS, 2)))
    else:
        a = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row + at + PAIRS_PER_HEAD, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_heads(
    a, b, out, head_stride, num_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`load_heads` turned round; heads are `head_stride` elements apart, which must be 64-bit."""
    at, mask = head_offsets(num_heads, head_stride, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    if INTERLEAVED:
        tl.store(out + at, tl.reshape(tl.join(a, b), (HEADS, 2 * PAIRS)), mask=mask)
    else:
        tl.store(out + at, a, mask=mask)
        tl.store(out + at + PAIRS_PER_HEAD, b, mask=mask)


@triton.jit
def load_tables(cos, sin, token, PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr):
    """Cosine and sine of a token's pairs, [1, PAIRS] float32, of tables [num_tokens, PAIRS_PER_HEAD]."""
    pairs = tl.arange(0, PAIRS)[None, :]
    table = token * PAIRS_PER_HEAD + pairs
    cosine = tl.load(cos + table, mask=pairs < PAIRS_PER_HEAD, other=0.0).to(tl.float32)
    sine = tl.load(sin + table, mask=pairs < PAIRS_PER_HEAD, other=0.0).to(tl.float32)
    return cosine, sine


@triton.jit
def rope_pack(
    a, b, cosine, sine, out, batch, token, num_tokens, num_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A token's heads, rotated, -> `out`, [batch, num_heads, num_tokens, head size].

    `batch` and `token` must be 64-bit: offsets pass 2^31.
    """
    size = 2 * PAIRS_PER_HEAD
    packed = (batch * num_heads * num_tokens + token) * size
    store_heads(
        a * cosine - b * sine, b * cosine + a * sine, out + packed, tl.cast(num_tokens, tl.int64) * size, num_heads,
        PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def scaled_rope_pack(
    row, inverse, weight, cosine, sine, out, batch, token, num_tokens, num_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`rope_pack` of a row of heads times `inverse` and a weight with one number per element of the row."""
    a, b = load_heads(row, num_heads, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    weight_a, weight_b = load_heads(weight, num_heads, PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED)
    rope_pack(
        a * inverse * weight_a, b * inverse * weight_b, cosine, sine, out, batch, token, num_tokens, num_heads,
        PAIRS_PER_HEAD, PAIRS, HEADS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def sum_of_squares(row, width, BLOCK: tl.constexpr):
    """Of one row, in float32."""
    at = tl.arange(0, BLOCK)
    values = tl.load(row + at, mask=at < width, other=0.0).to(tl.float32)
    return tl.sum(values * values)
