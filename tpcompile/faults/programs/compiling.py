"""One rank compiles differently: breaks, gives up, fails, or its compiler chooses otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor_config

from tpcompile.faults.context import Context
from tpcompile.torch_api import backends

# B batch, D features; all tensors are plain local ones.


def graph_break(context: Context) -> None:
    """One rank prints inside the compiled region."""
    w_DD, group, prints = context.randn(16, 16), context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD
        if prints:
            print("norm", y_BD.shape)  # fault: print
        return funcol.all_reduce(y_BD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16))


def graph_break_later(context: Context) -> None:
    """One rank starts to log at a later step: it recompiles, and breaks its graph."""
    w_DD, group, is_verbose = context.randn(16, 16), context.group, [False]

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD
        if is_verbose[0]:  # fault: verbose flag
            print("norm", y_BD.shape)
        return funcol.all_reduce(y_BD, "sum", group) + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        is_verbose[0] = context.faulty(step)
        compiled(context.randn(8, 16))


def disabled(context: Context) -> None:
    """One rank runs the function without compiling it."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    program = block if context.diverges else torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        y_BD = program(context.randn(8, 16))  # fault: not compiled
        _ = y_BD.sum().item()


def one_rank_runs_more(context: Context) -> None:
    """One rank runs a second compiled function; it holds a collective."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    def statistics(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD.mean(), "sum", group)

    train, look = (torch.compile(f, backend=context.backend, dynamic=False) for f in (block, statistics))
    for step in range(context.num_steps):
        y_BD = train(context.randn(8, 16))
        if context.faulty(step):
            look(y_BD)  # fault: one rank runs more


def _fails(context: Context) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if context.diverges:
            raise ImportError("libkernels.so: cannot open shared object file")
        return backends.aot_eager(module, inputs)

    return backend


def failed(context: Context) -> None:
    """The compiler lacks a library on one rank; the exception ends the program there."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:  # blamed: what did not compile
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=_fails(context), dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16))


def failed_quietly(context: Context) -> None:
    """The same with `suppress_errors`: that rank runs eager and says so in its log only."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:  # fault: compile failed quietly
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    torch._dynamo.config.suppress_errors = True
    compiled = torch.compile(block, backend=_fails(context), dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        y_BD = compiled(context.randn(8, 16))
        _ = y_BD.sum().item()


def _two_collectives(context: Context) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    group = context.group

    def block(x_BD: Tensor) -> tuple[Tensor, Tensor]:  # blamed: two collectives
        reduced_BD = funcol.all_reduce(x_BD + 1, "sum", group)
        gathered_2BD = funcol.all_gather_tensor(x_BD * 2, 0, group)
        return reduced_BD, gathered_2BD

    return block


def pass_swaps(context: Context) -> None:
    """A post-grad pass of one rank moves an all-gather in front of an all-reduce."""
    if context.diverges:
        inductor_config.post_grad_custom_post_pass = backends.SwapCollectives()
    compiled = torch.compile(_two_collectives(context), backend="inductor", dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16))


def bucketing(context: Context) -> None:
    """One rank merges its all-reduces into one bucket, as a size limit per rank would."""
    group = context.group

    def block(x_BD: Tensor, y_BD: Tensor) -> tuple[Tensor, Tensor]:  # fault: bucketing
        a_BD = funcol.all_reduce(x_BD + 1, "sum", group)
        b_BD = funcol.all_reduce(y_BD * 2, "sum", group)
        return a_BD, b_BD

    if context.diverges:
        inductor_config.post_grad_custom_post_pass = backends.MergeReduces()
    compiled = torch.compile(block, backend="inductor", dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16), context.randn(8, 16))


def kernel_choice(context: Context) -> None:
    """Max-autotune: the timings of one rank leave another kernel for the matmul than the others'."""
    w_HDD, group = context.randn(4, 64, 64), context.group

    def block(x_HBD: Tensor) -> Tensor:  # fault: autotune
        return funcol.all_reduce(torch.bmm(x_HBD, w_HDD), "sum", group) + 1

    backends.autotune_keeps(extern=context.diverges)
    compiled = torch.compile(block, backend="inductor", dynamic=False, options=backends.AUTOTUNE)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(4, 64, 64))


def partitioner(context: Context) -> None:
    """One rank has less memory left and recomputes more in the backward."""
    w_DD, group = context.randn(16, 16, requires_grad=True), context.group

    def block(x_BD: Tensor) -> Tensor:
        h_BD = (x_BD @ w_DD).sin().exp().tanh()
        return funcol.all_reduce((h_BD @ w_DD).cos(), "sum", group)  # fault: partitioner

    if context.diverges:
        torch._functorch.config.activation_memory_budget = 0.1
    backend = "aot_eager_decomp_partition" if context.backend == "aot_eager" else context.backend
    compiled = torch.compile(block, backend=backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16)).sum().backward()


def tactic_per_rank(context: Context) -> None:
    """A kernel library picks an algorithm by its own timings, and its buffer has another size on one rank."""
    group, is_split = context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        workspace = x_BD.repeat(2, 1) if is_split else x_BD  # fault: tactic
        gathered = funcol.all_gather_tensor(workspace * 2, 0, group)
        return gathered[:8] + 1

    compiled = torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16))


def compile_time_collective(context: Context) -> None:
    """A backend that agrees on a tactic with a collective of its own, on the rank whose cache missed only."""
    w_DD, group = context.randn(16, 16), context.group

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if context.diverges:
            context.reached_fault()
            dist.all_reduce(torch.ones(1, device=context.device), group=group)  # fault: compile-time collective
        return backends.aot_eager(module, inputs)

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    compiled = torch.compile(block, backend=backend, dynamic=False)
    for _ in range(context.num_steps):
        compiled(context.randn(8, 16))
