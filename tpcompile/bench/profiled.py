"""Events of the profiler -> kernels and launches of a step, and the communication that nothing else hides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from tpcompile.bench.records import Profile
from tpcompile.bench.step import Call, finish
from tpcompile.torch_api.profiler import is_kernel, on_gpu

_STEPS = 3
_COMMUNICATION = re.compile(
    r"nccl|one_shot|two_shot|multimem|symm_mem|all_reduce|allreduce|exchange|PtoP", re.IGNORECASE
)
"""Kernels of collectives, the ones that also compute among them, and copies between GPUs."""
_LAUNCH = re.compile(r"^(cuda|cu|hip)(Launch|GraphLaunch)")


@dataclass(frozen=True)
class Span:
    """A kernel or a copy on the GPU, in us."""

    name: str
    start: float
    end: float


def profiled(call: Call, device: torch.device) -> Profile:
    """Profile a warm call; empty on a CPU, where the profiler sees neither collectives nor Inductor's loops."""
    if device.type != "cuda":
        return Profile()
    call()
    finish(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            call()
        finish(device)
    events = list(profiler.events() or ())
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in on_gpu(events)]
    names = [event.name for event in events if str(event.device_type).endswith("CPU")]
    return summary(spans, names, num_steps=_STEPS)


def summary(spans: Sequence[Span], host_calls: Iterable[str], *, num_steps: int) -> Profile:
    """What ran on the GPU in `num_steps` steps, and the names of what the host called -> one step."""
    communication = [span for span in spans if _COMMUNICATION.search(span.name)]
    others = [span for span in spans if not _COMMUNICATION.search(span.name)]
    launches = sum(bool(_LAUNCH.match(name)) for name in host_calls)
    to_ms = 1 / (1e3 * num_steps)
    return Profile(
        kernels=round(sum(is_kernel(span.name) for span in spans) / num_steps),
        launches=round(launches / num_steps),
        busy_ms=length(union(spans)) * to_ms,
        communication_ms=length(union(communication)) * to_ms,
        exposed_ms=(length(union(spans)) - length(union(others))) * to_ms,
    )


def union(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """The intervals in which at least one of them ran."""
    open_from = open_to = None
    for span in sorted(spans, key=lambda one: one.start):
        if open_to is None or open_from is None:
            open_from, open_to = span.start, span.end
        elif span.start > open_to:
            yield open_from, open_to
            open_from, open_to = span.start, span.end
        else:
            open_to = max(open_to, span.end)
    if open_from is not None and open_to is not None:
        yield open_from, open_to


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """The sum of the lengths."""
    return sum(end - start for start, end in intervals)
