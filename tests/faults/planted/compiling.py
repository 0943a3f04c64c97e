"""One rank compiles differently: its graph breaks, it is not compiled, its compiler fails or chooses differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.faults import backends
from tests.faults.case import fault
from tests.faults.context import Context
from tpcompile.evidence.records.causes import Cause

# B batch, D features; all tensors are plain local ones.

_INDUCTOR_S = 300.0
"""Inductor takes long to compile where the cores are shared."""
_BREAKS = "pytorch#126846: a rank that breaks its graph deadlocks compile-time collectives"
_ABORTS = "unslothai/unsloth-zoo#967: one rank fails to import its compiled module, the others abort"


@fault(Cause.GRAPH_BREAK, _BREAKS, marker="# fault: print")
def graph_break(context: Context) -> None:
    """Rank 1 prints inside the region, from the beginning."""
    w_DD, group, prints = context.randn(16, 16), context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD @ w_DD
        if prints:
            print("norm", y_BD.shape)  # fault: print
        return funcol.all_reduce(y_BD, "sum", group) + 1

    context.run(block)


@fault(Cause.PYTHON_VALUE, _BREAKS, marker="# fault: verbose flag", step=2)
def graph_break_later(context: Context) -> None:
    """Rank 1 begins to print inside the region at step 2."""
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


@fault(
    Cause.COMPILE_DISABLED,
    "unslothai/unsloth-zoo#967: the compiled module is missing on one rank, the others abort",
    marker="# fault: not compiled",
)
def disabled(context: Context) -> None:
    """Rank 1 does not compile the function."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    program = block if context.diverges else torch.compile(block, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        y_BD = program(context.randn(8, 16))  # fault: not compiled
        _ = y_BD.sum().item()


@fault(
    Cause.EXTRA_COMPILE,
    "pytorch#175849: compile counts of the ranks are not compared any more",
    marker="# fault: one rank runs more",
    step=2,
)
def runs_more(context: Context) -> None:
    """Rank 1 runs a second compiled function at step 2; it has a collective."""
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


@fault(Cause.COMPILE_FAILED, _ABORTS, marker="# blamed: what did not compile")
def compile_failed(context: Context) -> None:
    """The backend of rank 1 raises ImportError."""
    w_DD, group = context.randn(16, 16), context.group

    def block(x_BD: Tensor) -> Tensor:  # blamed: what did not compile
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    context.run(block, backend=_fails(context))


@fault(Cause.COMPILE_FAILED, _ABORTS, marker="# fault: compile failed quietly")
def compile_failed_quietly(context: Context) -> None:
    """The backend of rank 1 raises ImportError under suppress_errors: it runs eager."""
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


@fault(
    Cause.COMPILER_PASS,
    "pytorch#150074: reorder_for_locality moves waits and so reorders collectives",
    "pytorch#189454: a compiled recv hoisted above the send",
    marker="# blamed: two collectives",
    limit_s=_INDUCTOR_S,
)
def pass_swaps(context: Context) -> None:
    """A post-grad pass on rank 1 swaps an all-reduce and an all-gather."""
    if context.diverges:
        inductor_config.post_grad_custom_post_pass = backends.SwapCollectives()
    compiled = torch.compile(_two_collectives(context), backend="inductor", dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(8, 16))


@fault(
    Cause.COMPILER_PASS,
    "pytorch#160527: bucketing can be different from rank to rank",
    marker="# fault: bucketing",
    limit_s=_INDUCTOR_S,
)
def bucketing(context: Context) -> None:
    """A pass on rank 1 merges two all-reduces into one."""
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


@fault(
    Cause.AUTOTUNE,
    "pytorch#163369: two ranks may choose different algorithms for one operator",
    "pytorch#140395: DDP and max-autotune hang, and no log shows what was autotuned",
    marker="# fault: autotune",
    options={"kernels": "stop"},
    limit_s=_INDUCTOR_S,
)
def autotune(context: Context) -> None:
    """Autotuning chooses a different matmul kernel on rank 1."""
    w_HDD, group = context.randn(4, 64, 64), context.group

    def block(x_HBD: Tensor) -> Tensor:  # fault: autotune
        return funcol.all_reduce(torch.bmm(x_HBD, w_HDD), "sum", group) + 1

    backends.autotune_keeps(extern=context.diverges)
    compiled = torch.compile(block, backend="inductor", dynamic=False, options=backends.AUTOTUNE)
    for step in range(context.num_steps):
        context.faulty(step)
        compiled(context.randn(4, 64, 64))


@fault(
    Cause.PARTITIONER,
    "pytorch#193043: ranks must agree on what is saved and what is recomputed",
    marker="# fault: partitioner",
)
def partitioner(context: Context) -> None:
    """The activation memory budget of rank 1 is 0.1: it recomputes more in the backward."""
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


@fault(
    Cause.PYTHON_VALUE,
    "flashinfer#3186, flashinfer#3187, sglang#23317, sglang#35343: TP ranks pick different kernel tactics",
    marker="# fault: tactic",
)
def tactic(context: Context) -> None:
    """Rank 1 picks a tactic with a buffer of a different size, and gathers that buffer."""
    group, is_split = context.group, context.diverges

    def block(x_BD: Tensor) -> Tensor:
        workspace = x_BD.repeat(2, 1) if is_split else x_BD  # fault: tactic
        gathered = funcol.all_gather_tensor(workspace * 2, 0, group)
        return gathered[:8] + 1

    context.run(block)


@fault(
    Cause.STUCK_COLLECTIVE,
    "vllm#52291, vllm#52292: synchronised autotuning deadlocks TP at start",
    "pytorch#126846: collectives at compile time deadlock when one rank compiles",
    "pytorch#193043: compile-time sync hangs when the cache hits on some ranks",
    marker="# fault: compile-time collective",
)
def compile_time_collective(context: Context) -> None:
    """The backend of rank 1 issues a collective while it compiles."""
    w_DD, group = context.randn(16, 16), context.group

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if context.diverges:
            context.reached_fault()
            dist.all_reduce(torch.ones(1, device=context.device), group=group)  # fault: compile-time collective
        return backends.aot_eager(module, inputs)

    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    context.run(block, backend=backend)
