"""Faults in the user's program: what a model does wrong inside the compiled region."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.gate.faults.fault import FaultContext, injects


class Wrapped(nn.Module):
    """A program around the stack, as a user's model is."""

    def __init__(self, inner: nn.Module, context: FaultContext) -> None:
        super().__init__()
        self.inner = inner
        self.rank = context.rank
        self.is_target = context.is_target


@injects("program", name="leading_print")
class LeadingPrint(Wrapped):
    """Prints before the first op: a break that `explain()` does not count."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        print("", end="")
        return self.inner(x, *rest)


@injects("program", name="trailing_print")
class TrailingPrint(Wrapped):
    """Prints after the last op."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        y = self.inner(x, *rest)
        print("", end="")
        return y


@injects("program", name="one_rank_print")
class OneRankPrint(Wrapped):
    """One rank prints, the others do not."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        y = self.inner(x, *rest)
        if self.is_target:
            print("", end="")
        return y * 1.0


@injects("program", name="rank_branch")
class RankBranch(Wrapped):
    """One more op on one rank."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        if self.rank == 0:
            x = x.sin()
        return self.inner(x, *rest)


@injects("program", name="rank_constant")
class RankConstant(Wrapped):
    """The rank baked in as a number, read from an attribute."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x * (self.rank + 1)
        return self.inner(x, *rest)


@injects("program", name="get_rank_constant")
class GetRankConstant(Wrapped):
    """The rank baked in through `dist.get_rank()`, which folds with no guard."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x * (dist.get_rank() + 1)
        return self.inner(x, *rest)


@injects("program", name="one_rank_output")
class OneRankOutput(Wrapped):
    """Wrong numbers on one rank under equal graphs: a buffer holds a different value."""

    def __init__(self, inner: nn.Module, context: FaultContext) -> None:
        super().__init__(inner, context)
        self.register_buffer("scale", torch.tensor(2.0 if context.is_target else 1.0))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.inner(x, *rest) * self.scale


@torch.library.custom_op("tpcompile_faults::local_scale", mutates_args=())
def local_scale(x: Tensor) -> Tensor:
    """A custom op that is not declared TP-aware."""
    return x * 1.0


@local_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


local_scale.register_autograd(lambda ctx, grad: grad * 1.0)


@injects("program", name="custom_op")
class CustomOp(Wrapped):
    """Calls the undeclared custom op."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = local_scale(x)
        return self.inner(x, *rest)
