"""What may differ between ranks: work that only some do, order of local work, shapes declared to differ."""

# T tokens of this rank, D model width
from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.healthy.program import Run, program, sgd
from tpcompile.collectives import all_reduce, all_to_all_single


@program(compiles_differ=True)
def metric_on_one_rank(run: Run) -> None:
    """A compiled metric that only rank 0 ever calls."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    metric = run.compile(lambda y: (y.softmax(-1) * y).sum(-1).mean())
    for step in run.steps():
        y = run.advance(compiled, optimizer, run.data(step))
        if run.rank == 0:
            metric(y)


@program(compiles_differ=True)
def late_metric_on_one_rank(run: Run) -> None:
    """The same from the third step on, with lengths of its own that recompile it."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    metric = run.compile(lambda y: y.square().mean())
    for step in run.steps():
        y = run.advance(compiled, optimizer, run.data(step))
        if run.rank == run.tp - 1 and step >= 2:
            metric(y.flatten()[: 7 + step])


@program(compiles_differ=True)
def final_evaluation_on_one_rank(run: Run) -> None:
    """After the last step rank 0 compiles an evaluation without collectives; the others have ended."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for step in run.steps():
        y = run.advance(compiled, optimizer, run.data(step))
    if run.rank == 0:
        time.sleep(1.0)
        run.compile(lambda y: y.exp().sum(0))(y)


@program()
def logging_on_one_rank(run: Run) -> None:
    """Rank 0 reads values and prints between steps."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        y = run.advance(compiled, optimizer, run.data(step))
        if run.rank == 0:
            print(f"step {step}: {y.norm().item():.3f}", flush=True)


def _in_other_order(run: Run, first: Any, second: Any) -> None:
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        x = run.data(step)
        for region in (first, second) if run.tp_rank % 2 == 0 else (second, first):
            region(x)
        run.advance(compiled, optimizer, x)


@program(sizes=(2, 4))
def local_regions_in_other_order(run: Run) -> None:
    """Two regions without collectives, compiled and called in opposite order on odd ranks."""

    def first(x: Tensor) -> Tensor:
        return x.sin() + 1

    def second(x: Tensor) -> Tensor:
        return x.cos() * 2

    _in_other_order(run, run.compile(first), run.compile(second))


@program(sizes=(2, 4))
def local_regions_of_a_factory(run: Run) -> None:
    """The same with two functions made by one line of code, which differ in a name only."""

    def made(function: Any) -> Any:
        return run.sentinel.watch(run.compile(lambda x: function(x) + 1), name=function.__name__)

    _in_other_order(run, made(torch.sin), made(torch.cos))


def _experts_step(run: Run, expert: Any, step: int, counts: list[list[int]]) -> Tensor:
    send = counts[run.tp_rank]
    receive = [row[run.tp_rank] for row in counts]
    x_TD = run.data(step, sum(send), run.draw.width)
    y_TD = all_to_all_single(x_TD, group=run.group, input_splits=send, output_splits=receive)
    return all_to_all_single(expert(y_TD), group=run.group, input_splits=receive, output_splits=send)


def _counts(run: Run, step: int) -> list[list[int]]:
    """Tokens from rank (row) to rank (column), equal knowledge on all ranks."""
    generator = torch.Generator().manual_seed(run.draw.seed + step)
    return torch.randint(2, 9, (run.tp, run.tp), generator=generator).tolist()


@program(sizes=(2, 4), trains=(False,), compiles_differ=True)
def experts_automatic_dynamic(run: Run) -> None:
    """Experts whose token counts differ per rank; ranks recompile at different steps. Declared uneven."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    weight = run.data(999, run.draw.width, run.draw.width)
    expert = run.compile(lambda x_TD: torch.relu(x_TD @ weight) @ weight.t())
    expert = run.sentinel.watch(expert, name="expert", uneven="token counts differ between ranks")
    for step in run.steps():
        run.advance(compiled, None, run.data(step))
        with torch.no_grad():
            _experts_step(run, expert, step, _counts(run, step))


@program(sizes=(2, 4))
def experts_marked_dynamic(run: Run) -> None:
    """The same with the token dimension marked dynamic: one compile on every rank. Declared uneven."""
    weight = torch.nn.Parameter(run.data(999, run.draw.width, run.draw.width))
    expert = run.compile(lambda x_TD: torch.relu(x_TD @ weight) @ weight.t(), dynamic=True)
    expert = run.sentinel.watch(expert, name="expert", uneven="token counts differ between ranks")

    def marked(x_TD: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x_TD, 0)
        y: Tensor = expert(x_TD)
        return y

    for step in run.steps():
        counts = _counts(run, step)
        run.advance(lambda step=step, counts=counts: _experts_step(run, marked, step, counts), None)


@program(sizes=(2, 4), trains=(False,))
def uneven_with_equal_collectives(run: Run) -> None:
    """Token counts differ, the collective inside has one shape on all ranks. Declared uneven."""
    weight = run.data(999, run.draw.width, run.draw.width)

    def load(x_TD: Tensor) -> Tensor:
        return all_reduce(torch.tanh(x_TD @ weight).sum(0), group=run.group)

    program = run.sentinel.watch(run.compile(load, dynamic=False), name="load", uneven="token counts differ")
    for step in run.steps():
        program(run.data(step, 3 + run.tp_rank, run.draw.width))


@program(sizes=(4,), dp=2)
def replicas_with_other_lengths(run: Run) -> None:
    """Data-parallel replicas get different sequence lengths, and recompile at different steps."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp, dynamic=False), sgd(mlp)
    for step in run.steps():
        length = 5 + (step + run.dp_rank) // 2
        run.advance(compiled, optimizer, run.data(step, 2, length, run.draw.width))


@program(sizes=(4,), dp=2, trains=(False,), compiles_differ=True)
def pipeline_stages(run: Run) -> None:
    """The other axis holds pipeline stages: other programs, and activations sent from stage to stage."""
    mlp = run.mlp()
    compiled = run.compile(mlp if run.dp_rank == 0 else lambda x: mlp(mlp(x).tanh()))
    stages = run.mesh.get_group("dp")
    for step in run.steps():
        x = run.data(step)
        if run.dp_rank == 1:
            dist.recv(x, group_src=0, group=stages)
        y = run.advance(compiled, None, x)
        if run.dp_rank == 0:
            dist.send(y, group_dst=1, group=stages)
