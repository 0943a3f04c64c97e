"""A function -> its CUDA graph; all graphs of one callable share a memory pool and a stream for captures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_FINISHED_S = 5.0
"""How long a release waits for replays in flight: a collective whose peer is dead never ends."""
_POLL_S = 0.001


class CudaGraphs:
    """Makes CUDA graphs on the current device; `replay` of its graphs must not overlap, since they share memory."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._last: torch.cuda.Stream | None = None

    def warm_up(self, call: Callable[[], Any], times: int) -> Any:
        """Call it `times` times, and return the result of the last call.

        On the stream of the capture: libraries make workspaces and communicators per stream.
        """
        result = None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                result = call()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def capture(self, call: Callable[[], Any]) -> tuple[CudaGraph, Any]:
        """(graph of the call, what the call returned: tensors that a replay writes). Nothing runs on the device yet.

        Thread-local: the watchdog of NCCL queries events on its own thread meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = call()
        return CudaGraph(graph, self), result

    def finish(self) -> None:
        """Wait a few seconds for replays in flight: `synchronize` would wait for ever for one whose peer is dead."""
        if self._last is None:
            return
        deadline = time.monotonic() + _FINISHED_S
        done = self._last.record_event()
        while not done.query() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def begin_replay(self) -> None:
        """A replay on a different stream than the last one waits for that."""
        stream = torch.cuda.current_stream()
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream


class CudaGraph:
    """What was captured."""

    def __init__(self, graph: Any, made_by: CudaGraphs) -> None:
        self._graph, self._made_by = graph, made_by

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._made_by.begin_replay()
        self._graph.replay()

    def release(self) -> None:
        """Free it, with its communicators."""
        self._graph.reset()
