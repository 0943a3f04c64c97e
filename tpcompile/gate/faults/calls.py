"""Faults in how attention calls its fast path: under `no_grad`, with other rotary tables, with other statistics.

They wrap what is in place, the kernels or the plain code that stands for them in the type check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.gate.faults.fault import FaultContext, injects
from tpcompile.nn.attention import Attention
from tpcompile.torch_api import c10d

Call = Callable[..., Any]
"""A fast path, its arguments and options -> its results."""


def _calling(stack: nn.Module, call: Call) -> nn.Module:
    """The stack with `call` around the fast path of every attention that has one."""
    for module in stack.modules():
        if isinstance(module, Attention) and module.fast_path is not None:
            module.fast_path = partial(call, module.fast_path)
    return stack


@injects("program")
def no_grad_norm(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Norms and RoPE called under no_grad: no gradient gets to q, k and their weights (needs --train)."""

    def call(fast_path: Call, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            return fast_path(*args, **options)

    return _calling(stack, call)


@injects("program")
def shifted_positions(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Rotary tables that begin at a different position, on all ranks alike."""
    return _calling(stack, _with_tables_from(1))


@injects("program")
def positions_of_the_rank(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Rotary tables that begin at the rank's own position, as if tokens were sharded."""
    return _calling(stack, _with_tables_from(context.rank))


def _with_tables_from(first: int) -> Call:
    def call(
        fast_path: Call, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *tables: Tensor, **options: Any
    ) -> Any:
        moved = [table_SR.roll(-first, 0) for table_SR in tables]
        return fast_path(q, k, q_weight, k_weight, *moved, **options)

    return call


@injects("program")
def averaged_statistics(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Sums of squares averaged over the ranks, where their sum is meant."""

    def call(fast_path: Call, *args: Any, all_reduce: Call, **options: Any) -> Any:
        def average(sums_BS2: Tensor) -> Tensor:
            pending = c10d.ops.all_reduce(sums_BS2, "avg", group_name)
            return c10d.ops.wait_tensor(pending)

        return fast_path(*args, all_reduce=average, **options)

    assert dist.group.WORLD is not None, "the gate has made it"
    group_name = dist.group.WORLD.group_name
    return _calling(stack, call)


@injects("program")
def divided_statistics(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Sums of squares divided by the number of ranks once more."""

    def call(fast_path: Call, *args: Any, all_reduce: Call, **options: Any) -> Any:
        def divided(sums_BS2: Tensor) -> Tensor:
            return all_reduce(sums_BS2) / context.world_size

        return fast_path(*args, all_reduce=divided, **options)

    return _calling(stack, call)
