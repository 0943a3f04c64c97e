"""A call -> the time that it takes on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_WARM_CALLS = 2
"""Calls before the clock of a round starts, so that host caches and the GPU's clock are those of many calls."""


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
