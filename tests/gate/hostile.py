"""Programs for `--target tests.gate.hostile:NAME` that do to their process what a program can do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gate.own import WIDTH, Full, Functional
from tpcompile.target import TargetContext

NUMBER = 3


class Counting(Functional):
    """Writes into a buffer at each call."""

    def __init__(self, full: Full, group: dist.ProcessGroup) -> None:
        super().__init__(full, group)
        self.num_calls: Tensor
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens."""
        self.num_calls.add_(1)
        return super().forward(x) + 0 * self.num_calls


def counts(ctx: TargetContext) -> Any:
    """A buffer that is written in the compiled region."""
    return Counting(Full(), ctx.mesh.get_group("tp")), torch.ones(2, 4, WIDTH)


def prints_much(ctx: TargetContext) -> Any:
    """10 MB in one line."""
    print("x" * 10_000_000)
    return counts(ctx)


def prints_what_is_no_text(ctx: TargetContext) -> Any:
    """Bytes that are not UTF-8, on both outputs."""
    for number in (1, 2):
        os.write(number, b"\xff\xfe caf\xe9\n")
    return counts(ctx)


def goes_elsewhere(ctx: TargetContext) -> Any:
    """A different current folder, and other GPUs."""
    os.chdir("/")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(ctx.rank)
    return counts(ctx)


def closes_its_output(ctx: TargetContext) -> Any:
    """Nothing can be printed from then on."""
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_RDONLY), number)
    return counts(ctx)


def leaves_a_child(ctx: TargetContext) -> Any:
    """A process that outlives the rank; the launcher ends it, or the test's own server of forks."""
    subprocess.Popen(["sleep", "300"])
    return counts(ctx)


def exits(ctx: TargetContext) -> NoReturn:
    """Ends the process as if all were well."""
    sys.exit(0)


class Odd(BaseException):
    """No Exception."""


def raises_oddly(ctx: TargetContext) -> NoReturn:
    """Raises what `except Exception` lets through."""
    raise Odd("strange")


def destroys(ctx: TargetContext) -> Any:
    """Ends communication."""
    found = counts(ctx)
    dist.destroy_process_group()
    return found


def takes_two(ctx: TargetContext, other: object) -> Any:
    """One argument too many."""
    return counts(ctx)


def takes_none() -> Any:
    """One argument too few."""
