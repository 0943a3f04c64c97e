"""A small program that reads its rank outside of its calls, and what can go wrong with it on one rank."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import tpcompile
from tpcompile.target import Inputs, TargetContext


class Scaled(nn.Module):
    """A layer, a number and a sum over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group, self.scale = nn.Linear(8, 8), group, 2

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return funcol.all_reduce(self.linear(x) * self.scale, "sum", self.group)  # fault: group


def read_in_call(program: Any, inputs: Inputs) -> object:
    """A step that reads the rank."""
    x = inputs[0]
    return program(x[:2] if dist.get_rank() == _ODD[0] else x)  # fault: step


def draws(program: Any, inputs: Inputs) -> object:
    """A step that skips its program by chance, with seeds that each rank has of its own."""
    return program(inputs[0]) if random.random() < 2 else None


def kept_by_package(program: Any, inputs: Inputs) -> object:
    """A step that an installed package decides, with what it has kept of the rank."""
    return program(inputs[0][: sys.modules["keeps_rank"].rows()])


_STEPS: dict[str, Callable[[Any, Inputs], object]] = {
    "step": read_in_call, "random": draws, "package": kept_by_package,
}  # fmt: skip
_ODD = [-1]
_ENDINGS = ("never returns", "killed", "SIGINT", "SIGTERM", "raise")


def misbehave(fault: str) -> None:
    """How a rank can end, or not end."""
    if fault == "never returns":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("SIGINT", "SIGTERM"):
        os.kill(os.getppid(), getattr(signal, fault))
        time.sleep(600)
    if fault == "raise":
        raise ValueError("this rank cannot")  # fault: raise


def build(ctx: TargetContext) -> tpcompile.Target:
    """Settings: fault, and the rank that has it."""
    fault, odd = ctx.settings.get("fault", ""), ctx.settings.get("odd", -1)
    _ODD[0] = odd
    rank = dist.get_rank()
    torch.cuda.set_device(rank % 8)
    torch.manual_seed(1234 + rank)
    random.seed(rank)
    if rank == 0:
        print("building")
    if fault in _ENDINGS and rank == odd:
        misbehave(fault)
    if fault == "package":
        keep_rank(rank)
    halves = [range(2), range(2, ctx.world_size)]
    for half in reversed(halves) if fault == "order" and rank == odd else halves:
        dist.new_group(list(half))  # fault: order
    model = Scaled(ctx.mesh.get_group("dp" if fault == "group" and rank == odd else "tp"))
    if fault == "attribute" and rank == odd:  # fault: attribute
        model.scale = 3
    inputs = (torch.randn(4, 8, device=ctx.device),)
    return tpcompile.Target(program=model.to(ctx.device), inputs=inputs, step=_STEPS.get(fault))


def keep_rank(rank: int) -> None:
    """Import an installed package that keeps the rank out of sight."""
    sys.path.append(str(Path(os.environ["KEEPS_RANK"]) / "site-packages"))
    import keeps_rank  # type: ignore[import-not-found]

    keeps_rank.KEPT["rank"] = rank
