"""A block's configuration, the ranks, and rates of the machine -> the least time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tpcompile.bench.records import Bound
from tpcompile.config import BlockConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
_PASSES_OF_TRAINING = 3
"""The backward pass has two products for each of the forward pass, reads the weights again and writes their
gradients."""


class Shape(NamedTuple):
    """A matrix product of one rank: [m, k] x [k, n]."""

    name: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """One multiplication and one addition for each of m n k."""
        return 2 * self.m * self.n * self.k


def products(block: BlockConfig, tp: int) -> Iterator[Shape]:
    """The matrix products of the linears of one block, on one rank."""
    tokens = block.batch * block.seq_len
    q, kv = block.num_heads * block.head_dim // tp, block.num_kv_heads * block.head_dim // tp
    hidden = block.ffn_dim // tp
    yield Shape("qkv", tokens, q + 2 * kv, block.dim)
    yield Shape("o", tokens, block.dim, q)
    if block.cross_attention:
        context = block.batch * (block.context_len or block.seq_len)
        yield Shape("cross q", tokens, q, block.dim)
        yield Shape("cross kv", context, 2 * kv, block.dim)
        yield Shape("cross o", tokens, block.dim, q)
    yield Shape("up", tokens, hidden * (2 if block.style == "llama" else 1), block.dim)
    yield Shape("down", tokens, block.dim, hidden)


def bound(block: BlockConfig, *, tp: int, train: bool, tflops: float, gbytes_per_s: float) -> Bound:
    """The larger of FLOPs at the GEMM rate and bytes of the weights at the rate of reading, on one rank."""
    shapes = list(products(block, tp))
    passes = _PASSES_OF_TRAINING if train else 1
    per_block = sum(shape.flops for shape in shapes) + _attention_flops(block) / tp
    weights = sum(shape.n * shape.k for shape in shapes) * ITEM_BYTES[block.dtype]
    flops = passes * block.num_layers * per_block
    num_bytes = passes * block.num_layers * weights
    return Bound(
        flops=flops,
        weight_bytes=num_bytes,
        flops_ms=flops / tflops / 1e9,
        bytes_ms=num_bytes / gbytes_per_s / 1e6,
    )


def _attention_flops(block: BlockConfig) -> float:
    """Both products of attention over all heads, q k^T and that with v; a causal mask hides half."""
    tokens, width = block.batch * block.seq_len, block.num_heads * block.head_dim
    own = 4.0 * tokens * block.seq_len * width * (0.5 if block.causal else 1.0)
    cross = 4.0 * tokens * (block.context_len or block.seq_len) * width if block.cross_attention else 0.0
    return own + cross
