"""Faults in how collectives are issued and in what they reduce."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.collectives import Dst
from tpcompile.collectives import api as collectives
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, TpComm
from tpcompile.faults.injected.fault import Fault, FaultContext
from tpcompile.nn.linear import RowParallelLinear


class OtherReduceOp(Collectives):
    """Maximum instead of sum."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """All-reduce with the wrong op."""
        if self.size == 1:
            return x
        assert self.group is not None
        pending = torch.ops._c10d_functional.all_reduce(x.contiguous(), "max", self.group.group_name)
        return torch.ops._c10d_functional.wait_tensor(pending)


class LocalNorm(Collectives):
    """Each rank normalises over its own shard; the statistics are not summed."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Scale the local sum instead of summing over the group."""
        return x * self.size if dst == "R" else super().all_reduce(x, dst)


class DroppedResult(Collectives):
    """An out-of-place reduce whose result is dropped, as seen in a public diffusion model."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Issue the reduce, return the input."""
        collectives.all_reduce(x, group=self.group, dst=dst)
        return x


class DoubleCopy(Collectives):
    """copy_to_tp twice: the gradient is summed twice."""

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Enter the parallel region twice."""
        return super().copy_to_tp(super().copy_to_tp(x))


class _BiasBeforeReduce(RowParallelLinear):
    def forward(self, x_BSi: Tensor) -> Tensor:
        """Add the bias on every rank, then reduce: tp times the bias."""
        return self.comm.all_reduce(nn.functional.linear(x_BSi, self.weight, self.bias))


def _disabled(comm: Collectives, context: FaultContext) -> TpComm:
    return DisabledCollectives(comm.group)


def _on_target(comm: Collectives, context: FaultContext) -> TpComm:
    return OtherReduceOp(comm.group) if context.is_target else comm


def _bias_first(stack: nn.Module, context: FaultContext) -> nn.Module:
    for module in stack.modules():
        if isinstance(module, RowParallelLinear):
            module.__class__ = _BiasBeforeReduce
    return stack


FAULTS = (
    Fault("disabled_collective", "in-place all_reduce under torch.compiler.disable", comm=_disabled),
    Fault("other_reduce_op", "max instead of sum on one rank", comm=_on_target),
    Fault("local_norm", "a norm over the local shard", comm=lambda comm, _: LocalNorm(comm.group)),
    Fault("dropped_result", "an out-of-place reduce whose result is dropped", comm=lambda c, _: DroppedResult(c.group)),
    Fault("double_copy", "copy_to_tp applied twice (needs --train)", comm=lambda comm, _: DoubleCopy(comm.group)),
    Fault("bias_before_reduce", "row-parallel bias added before the reduce", program=_bias_first),
)
