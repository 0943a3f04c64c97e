"""A program and its inputs -> one call of it, its results, and its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.target import Target, call_target

_WARM_CALLS = 2
"""Calls before the clock of a round starts, so that host caches and the GPU's clock are those of many calls."""


@dataclass
class Results:
    """The result of one call."""

    output: Any
    """A tensor, or what a user's `step` returns."""
    input_grad: Tensor | None = None
    grads: dict[str, Tensor] | None = None
    """Gradients of parameters, by name."""


Call = Callable[[], Results]


def forward_call(called: Any, program: Target) -> Call:
    """One forward pass of the compiled program, or its own step."""

    def call() -> Results:
        with nullcontext() if program.step is not None else torch.no_grad():
            return Results(call_target(program, called, program.inputs))

    return call


def training_call(called: Any, program: Target, cotangent: Tensor) -> Call:
    """Forward and backward: gradients of the first input and of all parameters, which are not accumulated.

    Raises ConfigError for inputs by name: which of them gets a gradient is not known.
    """
    if isinstance(program.inputs, Mapping):
        raise ConfigError("with --train, give the inputs as a tuple, the activations first, or give a step")
    x, *rest = [program.inputs] if isinstance(program.inputs, Tensor) else program.inputs
    x = x.detach().clone().requires_grad_()
    named = {name: one for name, one in program.program.named_parameters() if one.requires_grad}

    def call() -> Results:
        output = called(x, *rest)
        input_grad, *grads = torch.autograd.grad(output, [x, *named.values()], cotangent, allow_unused=True)
        return Results(output.detach(), input_grad, dict(zip(named, grads, strict=True)))

    return call


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(call: Call, num_calls: int, device: torch.device) -> float:
    """Mean ms of back-to-back calls, which all ranks begin together: by CUDA events, on CPU by the host's clock."""
    dist.barrier()
    for _ in range(_WARM_CALLS):
        call()
    if device.type == "cuda":
        return _between_events_ms(call, num_calls) / num_calls
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - began) * 1e3 / num_calls


def _between_events_ms(call: Call, num_calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
