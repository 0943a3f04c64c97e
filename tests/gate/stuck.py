"""A train step for `--target tests.gate.stuck:step` in which rank 1 does not arrive, by `--set how=...`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpcompile
from tests.gate.own import WIDTH, Full
from tpcompile.target import TargetContext

_NUM_CALLS = 11
"""The first call, and `gate.steady_calls`."""


def step(ctx: TargetContext) -> tpcompile.Target:
    """Collectives outside of the compiled region, as in most train steps."""
    how, calls = ctx.settings["how"], 0

    def train(program: Any, inputs: tuple[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        is_odd = ctx.rank == 1 and calls == {"leaves out": 1, "leaves out the last": _NUM_CALLS}.get(how, 3)
        y = program(*inputs)
        if is_odd and how == "sleeps":  # may sleep
            time.sleep(1000)  # sleeps
        leaves_out = is_odd and how not in ("sleeps", "aborts in the next call")
        if not leaves_out:  # may leave out
            dist.all_reduce(y)  # summed
        if how.startswith("aborts"):
            dist.all_reduce(y.new_ones(1000))  # larger
        if how == "aborts in the next call" and not is_odd:  # may repeat
            dist.all_reduce(y)  # again
        return y

    inputs = (torch.ones(2, 4, WIDTH, device=ctx.device),)
    return tpcompile.Target(program=Full().to(ctx.device), inputs=inputs, step=train)
