"""A small tensor-parallel module as a user writes one, and what can go wrong in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.fastpath.plain import sum_of_squares
from tpcompile.layout import ShardSpec
from tpcompile.nn.linear import ColumnParallelLinear, RowParallelLinear
from tpcompile.nn.norm import DistributedRMSNorm
from tpcompile.nn.sharding import Declared

WIDTH, HIDDEN, TOKENS = 16, 32, 6
FAULTS = (
    "funcol gradient", "local norm", "identity norm gradient", "dropped result", "bias before reduce", "no entry",
    "one too many", "wrong order", "nan",
)  # fmt: skip


class NormedMLP(nn.Module):
    """x [N, WIDTH] -> up, norm over the full hidden width, silu, down, with one fault or none."""

    def __init__(self, comm: TpComm, *, fault: str = "", hidden: int = HIDDEN) -> None:
        super().__init__()
        self.comm, self.fault = comm, fault
        self.up = ColumnParallelLinear(WIDTH, hidden, bias=True, comm=comm)
        self.norm = DistributedRMSNorm(hidden, eps=1e-6, comm=comm)
        self.down = RowParallelLinear(hidden, WIDTH, bias=True, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        """[N, WIDTH] -> [N, WIDTH]."""
        h = F.linear(x, self.up.weight, self.up.bias) if self.fault == "no entry" else self.up(x)
        y = self._down(F.silu(self._normed(h)))
        if self.fault == "one too many":
            y = y + 0 * self.comm.all_reduce(torch.zeros_like(y[:1]))
        if self.fault == "nan":
            y = torch.where(self.comm.rank_index(y.device) == 1, torch.full_like(y, float("nan")), y)
        return y

    def _normed(self, h: Tensor) -> Tensor:
        if self.fault == "local norm":
            return self.norm.scale(h, sum_of_squares(h) * self.comm.size)
        dst = "I" if self.fault == "identity norm gradient" else "R"
        return self.norm.scale(h, self.comm.all_reduce(sum_of_squares(h), dst=dst))

    def _down(self, h: Tensor) -> Tensor:
        weight, bias = self.down.weight, self.down.bias
        y = F.linear(h, weight, bias if self.fault == "bias before reduce" else None)
        if self.fault == "dropped result":
            self.comm.all_reduce(y)
        else:
            y = self.comm.all_reduce(y, dst="R" if self.fault == "funcol gradient" else "I")
        return y if self.fault == "bias before reduce" else y + bias

    def declared(self, dtype: torch.dtype) -> Declared:
        """Collectives for TOKENS tokens."""
        total = self.up.declared((TOKENS, WIDTH), dtype).then(self.norm.declared((TOKENS, WIDTH), dtype))
        total = total.then(self.down.declared((TOKENS, WIDTH), dtype))
        if self.fault == "wrong order":
            return Declared(total.forward[::-1], total.backward)
        return total


class Lookup(nn.Module):
    """A column-parallel projection, gathered: no sum crosses ranks; its result is replicated."""

    def __init__(self, comm: TpComm) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(HIDDEN // comm.size, WIDTH))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Rows are sharded."""
        return {"weight": ShardSpec(dim=0, parts=(HIDDEN,))}

    def forward(self, ids: Tensor) -> Tensor:
        """[N] int64 -> rows [N, WIDTH] of the whole table."""
        return F.embedding(ids, self.comm.all_gather(self.weight, dim=0, dst="I"))


def inputs(dtype: torch.dtype) -> tuple[Tensor]:
    """x [TOKENS, WIDTH], skewed along the width."""
    generator = torch.Generator().manual_seed(7)
    scales = torch.logspace(-1, 1, WIDTH, base=2)
    return ((torch.randn(TOKENS, WIDTH, generator=generator) * scales).to(dtype),)


def whole_inputs(dtype: torch.dtype) -> tuple[Tensor]:
    """x of small whole numbers."""
    generator = torch.Generator().manual_seed(7)
    return (torch.randint(-2, 3, (TOKENS, WIDTH), generator=generator).to(dtype),)


def ids(dtype: torch.dtype) -> tuple[Tensor]:
    """Row numbers, some twice."""
    return (torch.tensor([0, 5, 5, 31, 16, 15]),)


class LinearPair(nn.Module):
    """Column then row linear without anything between: whole numbers stay whole."""

    def __init__(self, comm: TpComm, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = 1.0 if comm.size == 1 else scale
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, bias=True, comm=comm)
        self.down = RowParallelLinear(HIDDEN, WIDTH, bias=True, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        """[N, WIDTH] -> [N, WIDTH]."""
        return self.down(self.up(x)) * self.scale
