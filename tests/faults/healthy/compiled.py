"""Ways to use torch.compile: several regions, graph breaks, recompiles, dynamic shapes, modes, limits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.healthy.program import Run, program, sgd
from tpcompile.collectives import all_gather_single, all_reduce, all_reduce_start, reduce_scatter_single

_LIMIT = 3


def _drive(run: Run, program: Any, module: nn.Module) -> None:
    optimizer = sgd(module)
    for step in run.steps():
        run.advance(program, optimizer, run.data(step))


@program(sizes=(2, 4))
def one_region(run: Run) -> None:
    """A compiled module."""
    mlp = run.mlp()
    _drive(run, run.compile(mlp), mlp)


@program()
def module_compile(run: Run) -> None:
    """`module.compile()` in place, under a module that is not compiled."""
    mlp = run.mlp()
    mlp.compile(backend=run.draw.backend)
    _drive(run, nn.Sequential(mlp, nn.LayerNorm(run.draw.width, device=run.device)), mlp)


@program()
def several_regions(run: Run) -> None:
    """Three compiled functions a step, two with collectives, eager collectives between."""
    first, second = run.mlp(), run.mlp(seed=1)
    head = run.compile(lambda x: torch.tanh(x).cumsum(-1))
    regions = run.compile(first), run.compile(second)

    def program(x: Tensor) -> Tensor:
        y: Tensor = head(regions[1](all_reduce(regions[0](x), group=run.group, op="avg")))
        return y

    _drive(run, program, nn.ModuleList([first, second]))


@program()
def nested_regions(run: Run) -> None:
    """A compiled function that calls a compiled module."""
    mlp = run.mlp()
    inner = run.compile(mlp)
    _drive(run, run.compile(lambda x: inner(x.sin()).cos()), mlp)


@program()
def graph_breaks(run: Run) -> None:
    """Two breaks a call, on all ranks, with collectives before and after."""
    mlp = run.mlp()

    def program(x: Tensor) -> Tensor:
        x = mlp(x)
        torch._dynamo.graph_break()
        x = mlp(x.relu())
        print("", end="")
        return mlp(x.sigmoid())

    _drive(run, run.compile(program), mlp)


@program()
def break_in_a_module(run: Run) -> None:
    """A collective of the user's behind `torch.compiler.disable`."""
    mlp = run.mlp()

    @torch.compiler.disable
    def norm(x: Tensor) -> float:
        total = x.detach().square().sum()
        dist.all_reduce(total, group=run.group)
        return float(total) ** 0.5

    def program(x: Tensor) -> Tensor:
        y = mlp(x)
        scale = torch.tensor(norm(y), device=run.device)
        return mlp(y / scale)

    _drive(run, run.compile(program), mlp)


@program()
def lengths_change_together(run: Run) -> None:
    """New sequence lengths at the same step on all ranks: automatic dynamic shapes."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step, run.draw.batch, 5 + 3 * (step // 2), run.draw.width))


@program()
def static_recompiles(run: Run) -> None:
    """`dynamic=False` and lengths that come again: a compile per length, on all ranks."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp, dynamic=False), sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step, run.draw.batch, 5 + step % 3, run.draw.width))


@program()
def marked_dynamic(run: Run) -> None:
    """`mark_dynamic`: one graph for all lengths."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for step in run.steps():
        x = run.data(step, run.draw.batch, 5 + 2 * step, run.draw.width)
        torch._dynamo.mark_dynamic(x, 1)
        run.advance(compiled, optimizer, x)


@program(trains=(False,))
def train_and_eval_modes(run: Run) -> None:
    """The same module under gradients, no_grad and inference_mode: a graph each."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    for step in run.steps():
        compiled(run.data(step)).sum().backward()
        with torch.no_grad():
            compiled(run.data(step))
        with torch.inference_mode():
            compiled(run.data(step))


@program(backends=("inductor",))
def reduce_overhead(run: Run) -> None:
    """mode="reduce-overhead"."""
    mlp = run.mlp()
    _drive(run, torch.compile(mlp, mode="reduce-overhead"), mlp)


@program(backends=("inductor",), trains=(False,))
def max_autotune(run: Run) -> None:
    """mode="max-autotune-no-cudagraphs": ranks choose kernels by themselves."""
    mlp = run.mlp()
    _drive(run, torch.compile(mlp, mode="max-autotune-no-cudagraphs"), mlp)


@program(backends=("aot_eager",), trains=(True,))
def compiled_autograd(run: Run) -> None:
    """The backward pass captured as a graph of its own."""
    mlp = run.mlp()
    with torch._dynamo.config.patch(compiled_autograd=True):
        program = run.compile(lambda x: mlp(x).square().mean())
        for step in run.steps():
            backward = run.compile(lambda x: program(x).backward())
            backward(run.data(step))


@program()
def recompile_limit_on_all_ranks(run: Run) -> None:
    """All ranks reach the limit of recompiles at the same call, and run eagerly from then on."""
    mlp = run.mlp()
    with torch._dynamo.config.patch(recompile_limit=_LIMIT):
        compiled = run.compile(mlp, dynamic=False)
        optimizer = sgd(mlp)
        for step in run.steps():
            for length in range(3, 3 + _LIMIT + 1):
                run.advance(compiled, optimizer, run.data(step, 1, length, run.draw.width))


@program()
def failed_fullgraph(run: Run) -> None:
    """A fullgraph compile that fails on all ranks; the program falls back to a different one."""
    mlp = run.mlp()

    def broken(x: Tensor) -> Tensor:
        y = mlp(x)
        torch._dynamo.graph_break()
        return mlp(y)

    strict, loose = run.compile(broken, fullgraph=True), run.compile(broken)

    def program(x: Tensor) -> Tensor:
        try:
            y: Tensor = strict(x)
        except torch._dynamo.exc.Unsupported:
            y = loose(x)
        return y

    _drive(run, program, mlp)


@program()
def forced_eager(run: Run) -> None:
    """Some steps with the stance "force_eager", on all ranks."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        with torch.compiler.set_stance("force_eager" if step == 1 else "default"):
            run.advance(compiled, optimizer, run.data(step))


@program(trains=(True,))
def compiled_optimizer(run: Run) -> None:
    """The optimizer's step compiled too."""
    mlp = run.mlp()
    optimizer = torch.optim.Adam(mlp.parameters(), lr=torch.tensor(1e-3, device=run.device))
    compiled, update = run.compile(mlp), run.compile(optimizer.step)
    for step in run.steps():
        compiled(run.data(step)).square().mean().backward()
        update()
        optimizer.zero_grad(set_to_none=False)


@program()
def started_and_waited(run: Run) -> None:
    """Our asynchronous all-reduce, with work between its start and its wait."""
    mlp = run.mlp()

    def program(x: Tensor) -> Tensor:
        pending = all_reduce_start(mlp(x), group=run.group)
        other = torch.tanh(x)
        return pending.wait() + other

    _drive(run, run.compile(program), mlp)


@program(sizes=(4,), dp=2)
def two_groups(run: Run) -> None:
    """Collectives of both axes of a mesh in one region."""
    mlp = run.mlp()
    dp = run.mesh.get_group("dp")

    def program(x: Tensor) -> Tensor:
        return all_reduce(mlp(x).mean(0), group=dp, op="avg", dst="R")

    _drive(run, run.compile(program), mlp)


@program(sizes=(2, 4))
def gather_and_scatter(run: Run) -> None:
    """Reduce-scatter and all-gather, ours; and an all-reduce of torch's own."""
    mlp = run.mlp()

    def program(x: Tensor) -> Tensor:
        h = reduce_scatter_single(mlp(x), dim=1, group=run.group)
        y = all_gather_single(torch.tanh(h), dim=1, group=run.group)
        return y + funcol.all_reduce(y.detach(), "max", run.group)

    _drive(run, run.compile(program), mlp)
