"""Events of the profiler -> kernels and launches of a step, and the communication that nothing else hides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType

from tpcompile.bench.records import Profile
from tpcompile.bench.step import finish
from tpcompile.torch_api.profiler import Call, is_kernel, on_gpu, profiled_calls

_STEPS = 3
_COMMUNICATION = re.compile(
    r"nccl|one_shot|two_shot|multimem|symm_mem|all_reduce|allreduce|exchange|PtoP", re.IGNORECASE
)
"""Kernels of collectives, the ones that also compute among them, and copies between GPUs."""
_LAUNCH = re.compile(r"^(cuda|cu|hip)(Launch|GraphLaunch)")


class Span(NamedTuple):
    """A kernel or a copy on the GPU, in us."""

    start: float
    end: float
    name: str


def profiled(call: Call, device: torch.device) -> Profile:
    """Profile a warm call; empty on a CPU, where the profiler sees neither collectives nor Inductor's loops."""
    if device.type != "cuda":
        return Profile()
    call()
    finish(device)
    events, _ = profiled_calls(call, _STEPS, device)
    spans = [Span(event.time_range.start, event.time_range.end, event.name) for event in on_gpu(events)]
    names = [event.name for event in events if event.device_type == DeviceType.CPU]
    return summary(spans, names, num_steps=_STEPS)


def summary(spans: Sequence[Span], host_calls: Iterable[str], *, num_steps: int) -> Profile:
    """What ran on the GPU in `num_steps` steps, and the names of what the host called -> one step."""
    communication = [span for span in spans if _COMMUNICATION.search(span.name)]
    others = [span for span in spans if not _COMMUNICATION.search(span.name)]
    kernels = [span for span in spans if is_kernel(span.name)]
    launches = [name for name in host_calls if _LAUNCH.match(name)]
    to_ms = 1 / (1e3 * num_steps)
    return Profile(
        kernels=round(len(kernels) / num_steps),
        launches=round(len(launches) / num_steps),
        busy_ms=_covered(spans) * to_ms,
        communication_ms=_covered(communication) * to_ms,
        exposed_ms=(_covered(spans) - _covered(others)) * to_ms,
    )


def _covered(spans: Iterable[Span]) -> float:
    """The time in which at least one of them ran."""
    covered, until = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
