"""Device functions of the norms: one token's heads as a tile of rotary pairs, normalised, weighted, rotated.

A tile is [HEADS, PAIRS] twice: the first and the second element of every rotary pair. The pairs of a head are elements
i and i + PAIRS_PER_HEAD, or 2i and 2i + 1 when INTERLEAVED. Ranges are padded to powers of two and masked.
"""

# h heads on this rank, E head size, R = E / 2 rotary pairs of a head
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_offsets(heads, pairs, PAIRS_PER_HEAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets of both elements of every pair within one token's row of heads."""
    if INTERLEAVED:
        first = heads * (2 * PAIRS_PER_HEAD) + 2 * pairs
        second = first + 1
    else:
        first = heads * (2 * PAIRS_PER_HEAD) + pairs
        second = first + PAIRS_PER_HEAD
    return first, second


@triton.jit
def load_pairs(row, first, second, mask):
    """Both elements in float32."""
    a = tl.load(row + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def finish_pairs(a, b, inverse, weight_a, weight_b, cos, sin, dtype: tl.constexpr):
    """Normalise, round to `dtype`, multiply by the weight, round, rotate: as the plain code rounds."""
    a = (a * inverse).to(dtype).to(tl.float32)
    b = (b * inverse).to(dtype).to(tl.float32)
    a = (a * weight_a).to(dtype).to(tl.float32)
    b = (b * weight_b).to(dtype).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def store_pairs(out, first, second, a, b, mask):
    """Both elements, rounded to the type of `out`."""
    tl.store(out + first, a.to(out.dtype.element_ty), mask=mask)
    tl.store(out + second, b.to(out.dtype.element_ty), mask=mask)
