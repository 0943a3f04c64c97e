"""Events of torch's profiler -> what ran on the GPU: seen on torch 2.11.0 and 2.13.0.

    name                         why
    Event.is_user_annotation     a range of record_function, also where it is drawn on the GPU's row
    Torch-Compiled Region        begins the name of a compiled region, drawn there too
    ##, ProfilerStep, nccl:      ranges of Inductor, of the profiler and of a collective, drawn there too
    Memcpy, Memset               begin the names of copies and fills

`tests/torch_api/test_profiler.py` fails when one of them moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]

REGION = "Torch-Compiled Region"
_DRAWN = (REGION, "##", "ProfilerStep", "nccl:")
_COPIES = ("Memcpy", "Memset")


def profiled_calls(call: Call, num_calls: int, device: torch.device) -> tuple[list[Any], float]:
    """The profiler's events of these calls, and milliseconds per call. On a GPU it sees all that they launch."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        call_ms = (time.perf_counter() - began) * 1e3 / num_calls
    return list(profiler.events() or ()), call_ms


def on_gpu(events: Iterable[Any]) -> list[Any]:
    """Kernels, copies and fills, without the ranges that are drawn over them."""
    found = []
    for event in events:
        is_there = event.device_type == DeviceType.CUDA
        is_range = event.is_user_annotation or event.name.startswith(_DRAWN)
        if is_there and not is_range:
            found.append(event)
    return found


def is_kernel(name: str) -> bool:
    """True for a name of the profiler that is neither a copy's nor a fill's."""
    return not name.startswith(_COPIES)
