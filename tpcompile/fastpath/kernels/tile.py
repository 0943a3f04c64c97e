"""Device functions of the norms: one token's heads as a tile of rotary pairs, normalised, weighted, rotated, packed.

A tile is [HEADS, PAIRS] twice: the first and the second element of every rotary pair. The pairs of a head are elements
i and i + PAIRS_PER_HEAD, or 2i and 2i + 1 when INTERLEAVED. Ranges are padded to powers of two and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_offsets(pairs, PAIRS_PER_HEAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Places of both elements of every pair within a head."""
    if INTERLEAVED:
        first = 2 * pairs
        second = first + 1
    else:
        first = pairs
        second = first + PAIRS_PER_HEAD
    return first, second


@triton.jit
def load_pairs(row, first, second, mask):
    """Both elements in float32."""
    a = tl.load(row + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def norm_rope_pack(
    row, inverse, eps, weight, cos, sin, out, batch, token, num_tokens, num_heads,
    PAIRS_PER_HEAD: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """One token's heads at `row`, scaled by `inverse`, -> `out`, [batch, num_heads, num_tokens, head size].

    With PER_HEAD every head is scaled by its own mean square and `eps`, and `weight` has one number per element of a
    head; else one per element of the row. `cos` and `sin` are [num_tokens, PAIRS_PER_HEAD]. `batch` and `token` must be
    64-bit: offsets pass 2^31.
    """
    heads = tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    mask = (heads < num_heads) & (pairs < PAIRS_PER_HEAD)
    first, second = pair_offsets(pairs, PAIRS_PER_HEAD, INTERLEAVED)
    head = heads * (2 * PAIRS_PER_HEAD)
    a, b = load_pairs(row, head + first, head + second, mask)
    if PER_HEAD:
        weight_a, weight_b = load_pairs(weight, first, second, pairs < PAIRS_PER_HEAD)
        inverse = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * PAIRS_PER_HEAD) + eps)[:, None]
    else:
        weight_a, weight_b = load_pairs(weight, head + first, head + second, mask)
    table = token * PAIRS_PER_HEAD + pairs
    cosine = tl.load(cos + table, mask=pairs < PAIRS_PER_HEAD, other=0.0).to(tl.float32)
    sine = tl.load(sin + table, mask=pairs < PAIRS_PER_HEAD, other=0.0).to(tl.float32)
    a = a * inverse * weight_a
    b = b * inverse * weight_b
    packed = ((batch * num_heads + heads) * num_tokens + token) * (2 * PAIRS_PER_HEAD)
    tl.store(out + packed + first, a * cosine - b * sine, mask=mask)
    tl.store(out + packed + second, b * cosine + a * sine, mask=mask)


@triton.jit
def sum_of_squares(row, width, BLOCK: tl.constexpr):
    """Of one row, in float32."""
    at = tl.arange(0, BLOCK)
    values = tl.load(row + at, mask=at < width, other=0.0).to(tl.float32)
    return tl.sum(values * values)
