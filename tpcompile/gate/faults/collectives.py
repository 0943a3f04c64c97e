"""Faults in how collectives are issued and in what they reduce."""

from __future__ import annotations

from torch import Tensor, nn

from tpcompile.collectives import Dst
from tpcompile.collectives import api as collectives
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, TpComm
from tpcompile.gate.faults.fault import FaultContext, injects
from tpcompile.nn.linear import RowParallelLinear
from tpcompile.torch_api import c10d


class OtherReduceOp(Collectives):
    """Maximum instead of sum."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        if self.size == 1:
            return x
        assert self.group is not None
        pending = c10d.ops.all_reduce(x.contiguous(), "max", self.group.group_name)
        return c10d.ops.wait_tensor(pending)


@injects("comm", name="local_norm")
class LocalNorm(Collectives):
    """Each rank normalises over its own shard; the statistics are not summed."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        return x * self.size if dst == "R" else super().all_reduce(x, dst)


@injects("comm", name="dropped_result")
class DroppedResult(Collectives):
    """An out-of-place reduce whose result is dropped, as seen in a public diffusion model."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        collectives.all_reduce(x, group=self.group, dst=dst)
        return x


@injects("comm", name="double_copy")
class DoubleCopy(Collectives):
    """copy_to_tp twice: the gradient is summed twice (needs --train)."""

    def copy_to_tp(self, x: Tensor) -> Tensor:
        return super().copy_to_tp(super().copy_to_tp(x))


class _BiasBeforeReduce(RowParallelLinear):
    """Adds the bias on every rank, then reduces: tp times the bias."""

    def forward(self, x_BSi: Tensor) -> Tensor:
        return self.comm.all_reduce(nn.functional.linear(x_BSi, self.weight, self.bias))


@injects("comm")
def disabled_collective(comm: Collectives, context: FaultContext) -> TpComm:
    """In-place all_reduce under torch.compiler.disable."""
    return DisabledCollectives(comm.group)


@injects("comm")
def other_reduce_op(comm: Collectives, context: FaultContext) -> TpComm:
    """Max instead of sum on one rank."""
    return OtherReduceOp(comm.group) if context.is_target else comm


@injects("program")
def bias_before_reduce(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Row-parallel bias added before the reduce."""
    for module in stack.modules():
        if isinstance(module, RowParallelLinear):
            module.__class__ = _BiasBeforeReduce
    return stack
