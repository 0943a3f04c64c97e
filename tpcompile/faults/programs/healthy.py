"""Healthy programs that a naive comparison of ranks would call divergent; all of them must stay green."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.faults.context import Context
from tpcompile.torch_api import backends

# B batch, D features; all tensors are plain local ones.


def clean(context: Context) -> None:
    """Equal ranks, forward and backward, and a second shape on all of them."""
    w_DD, group = context.randn(16, 16, requires_grad=True), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend="inductor", dynamic=False)
    for step in range(context.num_steps):
        compiled(context.randn(8 if step < 3 else 4, 16)).sum().backward()


def compile_order(context: Context) -> None:
    """Two functions without collectives are compiled in opposite order."""

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


def runs_more(context: Context) -> None:
    """One rank looks at its output with a second compiled function, without a collective, as rank 0 does for logs."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    def statistics(x_BD: Tensor) -> Tensor:
        return x_BD.std(0).max()

    train, look = (torch.compile(f, backend=context.backend, dynamic=False) for f in (block, statistics))
    for step in range(context.num_steps):
        y_BD = train(context.randn(8, 16))
        if context.rank == 0 and step >= 2:
            look(y_BD)


def slow_backend(context: Context) -> None:
    """The compiler of one rank takes seconds longer than any timer of the sentinel."""
    w_DD, group = context.randn(16, 16), context.group

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if context.rank == 1:
            time.sleep(9)
        return backends.aot_eager(module, inputs)

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=backend, dynamic=False)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def slow_rank(context: Context) -> None:
    """One rank loads its data for seconds while the other waits in the collective."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        if step == 2 and context.rank == 1:
            time.sleep(9)
        _ = compiled(context.randn(8, 16)).sum().item()


def group_names(context: Context) -> None:
    """Every rank passes a group of the same ranks that has another name."""
    ranks = list(range(context.world_size))
    groups = [dist.new_group(ranks, group_desc="experts") for _ in ranks]
    w_DD, group = context.randn(16, 16), groups[0]

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))


def stages(context: Context) -> None:
    """Two pipeline stages: other programs, compiled at other steps, in groups of their own."""
    w_DD, group = context.randn(16, 16), context.group

    def first(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group)

    def second(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce((x_BD @ w_DD).relu(), "sum", group) * 3

    compiled = torch.compile(first if context.rank == 0 else second, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        compiled(context.randn(8 if context.rank == 0 or step < 2 else 4, 16))
    dist.barrier()


def uneven_experts(context: Context) -> None:
    """Experts get other numbers of tokens, which is declared; their collectives are equal."""
    w_DD, group = context.randn(16, 16), context.group

    def experts(tokens_BD: Tensor) -> Tensor:
        return funcol.all_reduce((tokens_BD @ w_DD).sum(0), "sum", group)

    compiled = torch.compile(experts, backend=context.backend, dynamic=False)
    compiled = context.watch(compiled, name="experts", uneven="tokens of an expert")
    for step in range(context.num_steps):
        compiled(context.randn(8 + context.rank * (step % 2), 16))
