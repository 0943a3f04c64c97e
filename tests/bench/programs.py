"""Programs for the benchmark that are wrong, raise, die or hang."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile import Target, collectives
from tpcompile.bench.contract import BenchContext, Program
from tpcompile.bench.programs import stack_of
from tpcompile.bench.worker import Task
from tpcompile.collectives.api import Dst
from tpcompile.collectives.strategies import Collectives


class Unsummed(Collectives):
    """The wrong reduction: what the ranks have is not summed."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """This rank's part, as large as the sum."""
        return x * self.size


def unsummed(context: BenchContext) -> Program:
    return stack_of(context, Unsummed(context.group))


def pair(context: BenchContext) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The block as (program, inputs), as a user returns it."""
    built = stack_of(context, Collectives(context.group))
    return built.program, context.inputs


def raises(context: BenchContext) -> Program:
    """On one rank; the other waits for it."""
    if context.rank == 1:
        raise ValueError("the weights of rank 1 are gone")
    return stack_of(context, Collectives(context.group))


def dies(context: BenchContext) -> Program:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return stack_of(context, Collectives(context.group))


def nothing(context: BenchContext) -> None:
    """No program."""


class Linear(nn.Module):
    """x W^T, the columns of W over the ranks: a model of the user's own."""

    def __init__(self, weight: Tensor, *, rank: int = 0, size: int = 1, group: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(size, 1)[rank].clone())
        self.rank, self.size, self.group = rank, size, group

    def forward(self, x: Tensor) -> Tensor:
        y = x.chunk(self.size, -1)[self.rank] @ self.weight.T
        return y if self.group is None else collectives.all_reduce(y, group=self.group)


def model(context: BenchContext, *, seed: int = 0, is_summed: bool = True) -> Target:
    """A target of the gate that is not the preset's block: its width from the settings, with a reference."""
    generator = torch.Generator().manual_seed(seed)
    width = context.settings["dim"]
    weight, x = torch.randn(8, width, generator=generator), torch.randn(3, width, generator=generator)
    group = context.group if is_summed else None
    own = Linear(weight, rank=context.rank, size=context.world_size, group=group)
    return Target(program=own, inputs=(x,), reference=Linear(weight))


def same_model(context: BenchContext) -> Target:
    return model(context)


def other_model(context: BenchContext) -> Target:
    return model(context, seed=1)


def wrong_model(context: BenchContext) -> Target:
    return model(context, is_summed=False)


def trained(context: BenchContext) -> Target:
    """With a step: loss and gradient, of which autograd adds up the latter."""
    target = model(context)
    return replace(target, step=_step)


def _step(program: Any, inputs: Any) -> dict[str, Tensor]:
    loss = program(*inputs).square().mean()
    loss.backward()
    return {"loss": loss}


def hangs(connection: Connection, task: Task) -> None:
    """Serves nothing."""
    time.sleep(600)
