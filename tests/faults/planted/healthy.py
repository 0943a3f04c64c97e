"""Healthy programs that a simple comparison of ranks would report; all of them must stay green."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.faults import backends
from tests.faults.case import healthy
from tests.faults.context import Context

# B batch, D features; all tensors are plain local ones.

_SKEW = "pytorch#108971: NCCL timeouts, compiling takes 17 to 30 minutes on some ranks"


@healthy(
    "meta-pytorch/tlparse#125: its warning of diverging compile ids fires on healthy ranks with a cold cache",
    limit_s=300.0,
)
def clean(context: Context) -> None:
    """Healthy: equal ranks, forward and backward, two shapes."""
    w_DD = context.randn(16, 16, requires_grad=True)
    group = context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend="inductor", dynamic=False)
    for step in range(context.num_steps):
        compiled(context.randn(8 if step < 3 else 4, 16)).sum().backward()


@healthy("pytorch#175849: compile counts and orders of healthy ranks may differ")
def compile_order(context: Context) -> None:
    """Healthy: rank 1 compiles two functions without collectives in opposite order."""

    def double(x_BD: Tensor) -> Tensor:
        return x_BD * 2

    def shift(x_BD: Tensor) -> Tensor:
        return x_BD + 1

    functions = [torch.compile(f, backend=context.backend, dynamic=False) for f in (double, shift)]
    for _ in range(context.num_steps):
        x_BD = context.randn(8, 16)
        for compiled in functions if context.rank == 0 else functions[::-1]:
            compiled(x_BD)
    dist.barrier()


@healthy("pytorch#175849: compile counts of healthy ranks may differ")
def rank0_looks(context: Context) -> None:
    """Healthy: rank 0 runs a second compiled function without a collective, from step 2 on."""
    w_DD = context.randn(16, 16)
    group = context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    def statistics(x_BD: Tensor) -> Tensor:
        return x_BD.std(0).max()

    train, look = (torch.compile(f, backend=context.backend, dynamic=False) for f in (block, statistics))
    for step in range(context.num_steps):
        y_BD = train(context.randn(8, 16))
        if context.rank == 0 and step >= 2:
            look(y_BD)


@healthy(_SKEW, "karpathy/nanochat#722: one node has cached kernels, the other compiles")
def slow_backend(context: Context) -> None:
    """Healthy: compiling takes 9 s longer on rank 1."""
    w_DD, group = context.randn(16, 16), context.group

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if context.rank == 1:
            time.sleep(9)
        return backends.aot_eager(module, inputs)

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    context.run(block, backend=backend)


@healthy(_SKEW)
def slow_rank(context: Context) -> None:
    """Healthy: rank 1 sleeps 9 s at step 2 while rank 0 waits in the collective."""
    w_DD = context.randn(16, 16)
    group = context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        if step == 2 and context.rank == 1:
            time.sleep(9)
        _ = compiled(context.randn(8, 16)).sum().item()


@healthy("pytorch#189330: names of groups in graphs cause cache misses")
def group_names(context: Context) -> None:
    """Healthy: a group made by new_group, whose name differs from that of the default group."""
    ranks = list(range(context.world_size))
    groups = [dist.new_group(ranks, group_desc="experts") for _ in ranks]
    w_DD, group = context.randn(16, 16), groups[0]

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    context.run(block)


@healthy("xDiT#732: spmd_check hangs a pipeline-parallel model", mesh=(("pp", 2), ("tp", 1)))
def stages(context: Context) -> None:
    """Healthy: two pipeline stages with different programs."""
    w_DD = context.randn(16, 16)
    group = context.group

    def first(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group)

    def second(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce((x_BD @ w_DD).relu(), "sum", group) * 3

    compiled = torch.compile(first if context.rank == 0 else second, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        compiled(context.randn(8 if context.rank == 0 or step < 2 else 4, 16))
    dist.barrier()


@healthy("torchtitan#1649, torchtitan#1640: sizes of MoE depend on the data")
def uneven_experts(context: Context) -> None:
    """Healthy: numbers of tokens differ between ranks, as declared."""
    w_DD, group = context.randn(16, 16), context.group

    def experts(tokens_BD: Tensor) -> Tensor:
        return funcol.all_reduce((tokens_BD @ w_DD).sum(0), "sum", group)

    compiled = torch.compile(experts, backend=context.backend, dynamic=False)
    compiled = context.watch(compiled, name="experts", uneven="tokens of an expert")
    for step in range(context.num_steps):
        compiled(context.randn(8 + context.rank * (step % 2), 16))
