"""Faults in the user's program: what a model does wrong inside the compiled region."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.faults.injected.fault import Fault, FaultContext


class Wrapped(nn.Module):
    """A program around the stack, as a user's model is."""

    def __init__(self, inner: nn.Module, context: FaultContext) -> None:
        super().__init__()
        self.inner = inner
        self.rank = context.rank
        self.is_target = context.is_target


class LeadingPrint(Wrapped):
    """Prints before the first op: a break that `explain()` does not count."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Print, then run the stack."""
        print("", end="")
        return self.inner(x, *rest)


class TrailingPrint(Wrapped):
    """Prints after the last op."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run the stack, then print."""
        y = self.inner(x, *rest)
        print("", end="")
        return y


class OneRankPrint(Wrapped):
    """One rank prints, the others do not."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Print on the target rank, then run the stack."""
        y = self.inner(x, *rest)
        if self.is_target:
            print("", end="")
        return y * 1.0


class RankBranch(Wrapped):
    """One more op on one rank."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Branch on the rank, then run the stack."""
        if self.rank == 0:
            x = x.sin()
        return self.inner(x, *rest)


class RankConstant(Wrapped):
    """The rank baked in as a number, read from an attribute."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Scale by the rank, then run the stack."""
        x = x * (self.rank + 1)
        return self.inner(x, *rest)


class GetRankConstant(Wrapped):
    """The rank baked in through `dist.get_rank()`, which folds with no guard."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Scale by the rank, then run the stack."""
        x = x * (dist.get_rank() + 1)
        return self.inner(x, *rest)


class OneRankOutput(Wrapped):
    """Wrong numbers on one rank under equal graphs: a buffer holds another value."""

    def __init__(self, inner: nn.Module, context: FaultContext) -> None:
        super().__init__(inner, context)
        self.register_buffer("scale", torch.tensor(2.0 if context.is_target else 1.0))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run the stack, then scale its output."""
        return self.inner(x, *rest) * self.scale


@torch.library.custom_op("tpcompile_faults::local_scale", mutates_args=())
def local_scale(x: Tensor) -> Tensor:
    """A custom op nobody declared TP-aware."""
    return x * 1.0


@local_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


local_scale.register_autograd(lambda ctx, grad: grad * 1.0)


class CustomOp(Wrapped):
    """Calls the undeclared custom op."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Run the custom op, then the stack."""
        x = local_scale(x)
        return self.inner(x, *rest)


def _triton_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    from tpcompile.faults.injected.triton_kernel import TritonKernel

    return TritonKernel(stack, context)


FAULTS = (
    Fault("leading_print", "a print before the first op", program=LeadingPrint),
    Fault("trailing_print", "a print after the last op", program=TrailingPrint),
    Fault("one_rank_print", "a print on one rank only", program=OneRankPrint),
    Fault("rank_branch", "if rank == 0: x = x.sin()", program=RankBranch),
    Fault("rank_constant", "x * (rank + 1)", program=RankConstant),
    Fault("get_rank_constant", "x * (dist.get_rank() + 1), folded with no guard", program=GetRankConstant),
    Fault("one_rank_output", "a buffer with another value on one rank, equal graphs", program=OneRankOutput),
    Fault("custom_op", "an undeclared custom op in the graph", program=CustomOp),
    Fault("triton_kernel", "an undeclared Triton kernel in the graph", program=_triton_kernel, needs_gpu=True),
)
