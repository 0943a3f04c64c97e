"""Negative controls: programs that do diverge, in which the harness must report alarms."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from tests.faults.healthy.program import Run, program, sgd


@program(is_clean=False, backends=("aot_eager",), trains=(False,))
def diverges(run: Run) -> None:
    """Negative control: different arithmetic on one rank, silently wrong numbers without a sentinel."""
    mlp = run.mlp()

    def program(x: Tensor) -> Tensor:
        y: Tensor = mlp(x)
        return y * 2 if run.rank == 1 else y

    compiled = run.compile(program)
    for step in run.steps():
        run.advance(compiled, sgd(mlp), run.data(step))


@program(is_clean=False, backends=("aot_eager",), trains=(False,))
def compiles_on_one_rank(run: Run) -> None:
    """Negative control: a local function compiled on one rank, by a program that does not say that it may."""
    run.compile(torch.sin)(run.data(0))
    if run.rank == 0:
        run.compile(torch.cos)(run.data(0))


@program(is_clean=False, backends=("aot_eager",), trains=(False,))
def dies_silently(run: Run) -> None:
    """Negative control: a rank that ends with exit code 0 in the middle of the run, without an exception."""
    run.compile(torch.sin)(run.data(0))
    if run.rank == 1:
        os._exit(0)


@program(is_clean=False, backends=("aot_eager",), trains=(False,))
def never_ends(run: Run) -> None:
    """Negative control: a program that takes longer than any limit."""
    run.compile(torch.sin)(run.data(0))
    time.sleep(3600)
