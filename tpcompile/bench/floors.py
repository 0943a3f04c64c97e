"""A device -> the rates of matrix products and of reads that the floor is computed from."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tpcompile.bench.bound import Shape, products
from tpcompile.bench.records import Floors, Product
from tpcompile.config import BlockConfig

_SQUARE = {"cuda": 8192, "cpu": 512}
_READ_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_CALLS_IN_GRAPH = 10
_REPEATS = 5
Call = Callable[[], object]


def measure(block: BlockConfig, tp: int, device: torch.device) -> Floors:
    """The rates of this rank's device, while nothing else runs on it; ranks must not share one."""
    dtype = getattr(torch, block.dtype)
    size = _SQUARE[device.type]
    large = _product(Shape("large", size, size, size), dtype, device)
    own = tuple(_product(shape, dtype, device) for shape in products(block, tp))
    return Floors(
        gemm_tflops=max(one.tflops for one in (large, *own)),
        read_gbytes_per_s=_read_rate(device),
        products=own,
    )


def _read_rate(device: torch.device) -> float:
    """GB/s of the fastest of torch's sum and, on a GPU, a kernel of ours: weights are read, and nothing is written.

    A copy does not measure it: in a CUDA graph `copy_` is a memcpy node, which took 2,425 GB/s, read and written, on
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


def _time_us(call: Call, device: torch.device) -> float:
    """The fastest round of calls, which a floor asks for; on a GPU in a CUDA graph, without the time of the host."""
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
    return min(found)
