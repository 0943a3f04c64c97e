"""A call -> its time on this rank; by the profiler, its kernels, launches and exposed communication."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from tpcompile.bench.records import Profile
from tpcompile.torch_api.profiler import Call, is_kernel, on_gpu, profiled_calls

_WARM_CALLS = 2
"""Calls before the clock of a round starts, so that host caches and the GPU's clock are those of many calls."""
_PROFILED_STEPS = 3
_COMMUNICATION = re.compile(
    r"nccl|one_shot|two_shot|multimem|symm_mem|all_reduce|allreduce|exchange|PtoP", re.IGNORECASE
)
"""Kernels of collectives, the ones that also compute among them, and copies between GPUs."""
_LAUNCH = re.compile(r"^(cuda|cu|hip)(Launch|GraphLaunch)")


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The host's time of a call that has ended on the device."""
    began = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - began


def timed_ms(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Mean ms of back-to-back calls, which all ranks begin together."""
    dist.barrier()
    for _ in range(_WARM_CALLS):
        call()
    return device_ms(call, num_calls, device)


def device_ms(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Mean ms of back-to-back calls: by CUDA events, on CPU by the host's clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - began) * 1e3 / num_calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_calls


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
    events, _ = profiled_calls(call, _PROFILED_STEPS, device)
    spans = [Span(event.time_range.start, event.time_range.end, event.name) for event in on_gpu(events)]
    names = [event.name for event in events if event.device_type == DeviceType.CPU]
    return summary(spans, names, num_steps=_PROFILED_STEPS)


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
