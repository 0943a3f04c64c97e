"""The devices of a group -> rates of matrix products and reads, and times of all-reduces by size and algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.bench.bound import Shape, products
from tpcompile.bench.records import AllReduce, Floors, Product
from tpcompile.collectives import api as collectives
from tpcompile.config import BlockConfig
from tpcompile.torch_api import symmetric

_SQUARE = {"cuda": 8192, "cpu": 512}
_READ_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20, 48 << 20)
_SIZES_ON_CPU = (4 << 10, 256 << 10)
EXCHANGE = "exchange with residual and RMSNorm"
_EXCHANGED_TOKENS = 1024
"""Larger sums are left to NCCL."""
_CALLS_IN_GRAPH = 10
_REPEATS = 5
Call = Callable[[], object]


def measure(block: BlockConfig, group: dist.ProcessGroup, device: torch.device) -> Floors:
    """All ranks call it alike, with nothing else on their devices; ranks must not share one."""
    dtype = getattr(torch, block.dtype)
    size = _SQUARE[device.type]
    large = _product(Shape("large", size, size, size), dtype, device)
    own = tuple(_product(shape, dtype, device) for shape in products(block, group.size()))
    return Floors(
        gemm_tflops=max(one.tflops for one in (large, *own)),
        read_gbytes_per_s=_read_rate(device),
        products=own,
        all_reduces=tuple(_all_reduces(block, group, device)),
    )


def _read_rate(device: torch.device) -> float:
    """GB/s of the fastest of torch's sum and, on a GPU, a kernel of ours: weights are read, and nothing is written.

    A copy is no measure of it: in a CUDA graph `copy_` is a memcpy node, which took 2,425 GB/s, read and written, on
    an H100 that reads 3,160.
    """
    source = torch.zeros(_READ_BYTES[device.type] // 4, device=device)
    readers: list[Call] = [source.sum]
    if device.type == "cuda":
        from tpcompile.bench.reading import reader  # imports Triton

        readers.append(reader(source))
    return source.nbytes / min(_time_us(read, device) for read in readers) / 1e3


def _product(shape: Shape, dtype: torch.dtype, device: torch.device) -> Product:
    x = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
    weight = torch.randn(shape.n, shape.k, device=device, dtype=dtype)
    us = _time_us(lambda: torch.nn.functional.linear(x, weight), device)
    return Product(**shape._asdict(), us=us, tflops=shape.flops / us / 1e6)


def _all_reduces(block: BlockConfig, group: dist.ProcessGroup, device: torch.device) -> Iterator[AllReduce]:
    """Every size by every algorithm; the sizes of the block, activations and packed statistics, among them."""
    if group.size() == 1:
        return
    tokens = block.batch * block.seq_len
    own = {tokens * block.dim * getattr(torch, block.dtype).itemsize}
    if block.qk_norm == "full":
        own.add(tokens * 2 * 4)
    sizes = sorted(own | set(_SIZES if device.type == "cuda" else _SIZES_ON_CPU))
    for size in sizes:
        for algorithm in ("default", "one-shot", "two-shot"):
            yield _all_reduce(algorithm, size, group, device)
    if block.norm == "rms" and tokens <= _EXCHANGED_TOKENS:
        yield _exchange(block, group, device)


def _exchange(block: BlockConfig, group: dist.ProcessGroup, device: torch.device) -> AllReduce:
    """The kernel of ours that sums the block's activations, beside the residual add and the norm that it also does."""
    dtype = getattr(torch, block.dtype)
    tokens = block.batch * block.seq_len
    size = tokens * block.dim * dtype.itemsize
    x = torch.zeros(block.batch, block.seq_len, block.dim, device=device, dtype=dtype)
    return _timed(EXCHANGE, size, lambda: _exchanging(x, tokens, group), device)


def _exchanging(x: Tensor, tokens: int, group: dist.ProcessGroup) -> Call:
    from tpcompile.fastpath.kernels.all import LAUNCHERS, ROW_WORDS  # imports Triton
    from tpcompile.fastpath.kernels.exchange_memory import Exchange

    name = "all_reduce_add_rms_norm"
    row_words = ROW_WORDS[name](x.shape[-1], x.dtype, tokens)
    exchange = Exchange.of_group(group, num_rows=tokens, row_words=row_words, device=x.device)
    weight = torch.ones_like(x[0, 0])
    return lambda: LAUNCHERS[name](x, x, weight, eps=1e-6, exchange=exchange)


def _all_reduce(algorithm: str, size: int, group: dist.ProcessGroup, device: torch.device) -> AllReduce:
    """`default` is NCCL, or gloo on CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    padded = -(-size // (16 * group.size())) * 16 * group.size()  # two-shot takes whole vectors of every rank
    like = torch.zeros(padded // dtype.itemsize, device=device, dtype=dtype)
    return _timed(algorithm, size, lambda: _summing(algorithm, like, group), device)


def _timed(algorithm: str, size: int, made: Callable[[], Call], device: torch.device) -> AllReduce:
    if algorithm != "default" and device.type != "cuda":
        return AllReduce(algorithm=algorithm, size_bytes=size, us=None, why_not="needs GPUs")
    try:
        us = _time_us(made(), device)
    except Exception as error:  # of a device or build without it; all ranks alike
        return AllReduce(algorithm=algorithm, size_bytes=size, us=None, why_not=str(error).partition("\n")[0])
    return AllReduce(algorithm=algorithm, size_bytes=size, us=us)


def _summing(algorithm: str, like: Tensor, group: dist.ProcessGroup) -> Call:
    if algorithm == "default":
        return lambda: collectives.all_reduce(like, group=group)
    return symmetric.all_reduce(algorithm, like, group)


def _time_us(call: Call, device: torch.device) -> float:
    """The fastest round of calls, as a floor asks for: in a CUDA graph, so that nothing of the host is in it."""
    with torch.no_grad():
        for _ in range(3):
            call()
        if device.type != "cuda":
            return min(_host_us(call) for _ in range(_REPEATS))
        return _graph_us(call)


def _host_us(call: Call) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS_IN_GRAPH):
        call()
    return (time.perf_counter() - began) * 1e6 / _CALLS_IN_GRAPH


def _graph_us(call: Call) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS_IN_GRAPH):
            call()
    graph.replay()
    found = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / _CALLS_IN_GRAPH)
    del graph  # before the group is destroyed, or that never returns
    return min(found)
