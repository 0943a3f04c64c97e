"""Programs in which a value depends on the rank under equal programs, and does not where the sentence is followed.

Those of causes are in the pages of `tpcompile explain`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.advice.played import Rank, suggested
from tpcompile.evidence.records.compile import TaintKind

# B batch, D features


class Scaled(torch.nn.Module):
    def __init__(self, scale: float | Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD * self.scale


@suggested(TaintKind.DIFFERS)
def kept_in_a_tensor(at: Rank) -> None:
    scale = 0.25 if at.rank == 0 else 0.75
    torch.compile(Scaled(torch.tensor(scale) if at.follows else scale))(torch.ones(8, 4))


def multiplied(scale: float, read: Callable[[], float], at: Rank) -> None:
    buffer = torch.tensor(scale)

    def block(x_BD: Tensor) -> Tensor:
        return x_BD * (buffer if at.follows else read())

    torch.compile(block)(torch.ones(8, 4))


@suggested(TaintKind.RANK)
def rank_in_a_buffer(at: Rank) -> None:
    multiplied(float(at.rank), dist.get_rank, at)


@suggested(TaintKind.ENVIRONMENT)
def variable_in_a_buffer(at: Rank) -> None:
    os.environ["SCALE"] = str(at.rank + 2)
    multiplied(float(os.environ["SCALE"]), lambda: float(os.environ["SCALE"]), at)
