"""A block, the ranks and a device -> the rates of matrix products and of reads, and the least time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tpcompile.bench.records import Bound, Floors, Product
from tpcompile.bench.step import device_ms
from tpcompile.config import BlockConfig

_SQUARE = {"cuda": 8192, "cpu": 512}
"""Size of the large square product that is measured beside those of the block."""
_READ_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Far more than a cache holds, so that the rate is that of the memory."""
_CALLS_IN_GRAPH = 10
_REPEATS = 5
"""Rounds of so many calls, of which the fastest counts: a rate that is too low is a floor that programs beat."""
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


def bound(block: BlockConfig, floors: Floors, *, tp: int, train: bool) -> Bound:
    """FLOPs at the rate of products, and bytes of the weights at the rate of reading, on one rank."""
    shapes = list(products(block, tp))
    num_passes = block.num_layers * (_PASSES_OF_TRAINING if train else 1)
    # Both products of attention over all heads, q k^T and that with v; a causal mask hides half.
    tokens, width = block.batch * block.seq_len, block.num_heads * block.head_dim
    own = 4.0 * tokens * block.seq_len * width * (0.5 if block.causal else 1.0)
    cross = 4.0 * tokens * (block.context_len or block.seq_len) * width if block.cross_attention else 0.0
    attention_flops = own + cross
    flops = num_passes * (sum(shape.flops for shape in shapes) + attention_flops / tp)
    num_weights = num_passes * sum(shape.n * shape.k for shape in shapes)
    weight_bytes = num_weights * getattr(torch, block.dtype).itemsize
    return Bound(
        flops=flops,
        weight_bytes=weight_bytes,
        flops_ms=flops / floors.gemm_tflops / 1e9,
        bytes_ms=weight_bytes / floors.read_gbytes_per_s / 1e6,
    )


def measure(block: BlockConfig, tp: int, device: torch.device) -> Floors:
    """The rates of this rank's device, while nothing else runs on it; ranks must not share one."""
    dtype = getattr(torch, block.dtype)
    size = _SQUARE[device.type]
    large = _product(Shape("large", size, size, size), dtype, device)
    own = tuple(_product(shape, dtype, device) for shape in products(block, tp))
    fastest = max(one.tflops for one in (large, *own))
    read_rate = _read_rate(device)
    return Floors(gemm_tflops=fastest, read_gbytes_per_s=read_rate, products=own)


def _read_rate(device: torch.device) -> float:
    """GB/s of the fastest of torch's sum and, on a GPU, a kernel of ours: weights are read, and nothing is written.

    A copy does not measure it: in a CUDA graph `copy_` is a memcpy node, which took 2,425 GB/s, read and written, on
    an H100 that reads 3,160.
    """
    source = torch.zeros(_READ_BYTES[device.type] // 4, device=device)
    readers: list[Callable[[], object]] = [source.sum]
    if device.type == "cuda":
        from tpcompile.bench.reading import reader  # imports Triton

        readers.append(reader(source))
    fastest_us = min(_time_us(read, device) for read in readers)
    return source.nbytes / fastest_us / 1e3


def _product(shape: Shape, dtype: torch.dtype, device: torch.device) -> Product:
    x = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
    weight = torch.randn(shape.n, shape.k, device=device, dtype=dtype)
    us = _time_us(lambda: torch.nn.functional.linear(x, weight), device)
    return Product(**shape._asdict(), us=us, tflops=shape.flops / us / 1e6)


@torch.no_grad()
def _time_us(call: Callable[[], object], device: torch.device) -> float:
    """The fastest round of calls, which a floor asks for; on a GPU in a CUDA graph, without the time of the host."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        return min(device_ms(call, _CALLS_IN_GRAPH, device) for _ in range(_REPEATS)) * 1e3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries events on its own thread meanwhile, which a global capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS_IN_GRAPH):
            call()
    graph.replay()
    return min(device_ms(graph.replay, 1, device) for _ in range(_REPEATS)) * 1e3 / _CALLS_IN_GRAPH
