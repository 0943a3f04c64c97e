"""Mode of the repro -> how a model issues its collectives; the model's own code is the same in all three.

mode   class                  all_reduce                                 gradient
A      DisabledCollectives    in-place, hidden from Dynamo               none stated: a cliff of graph breaks
B      InPlaceCollectives     in-place, rewritten by Dynamo              none stated: x group size under compile
C      Collectives            tpcompile.dist.collectives                 stated by dst, equal in eager and compiled
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.dist import collectives
from tpcompile.dist.collectives import Dst
from tpcompile.dist.mesh import neighbours


class TpComm(Protocol):
    """What a parallel module needs: sizes to build itself, and the operations its forward issues."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Sum over the group; the caller owns `x` and does not use it again."""
        ...

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Enter a tensor-parallel region."""
        ...

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """Concatenate the ranks' shards along `dim`."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over the group, keep this rank's part of `dim`."""
        ...

    def scatter(self, x: Tensor, dim: int, src: Dst = "I") -> Tensor:
        """This rank's part of `dim` of a replicated tensor."""
        ...

    def rank_index(self, device: torch.device) -> Tensor:
        """`rank` as tensor data, [1] int64: the only form of it that compiled code may read."""
        ...

    def replicas(self, count: int) -> TpComm:
        """The same operations among the `count` neighbouring ranks that hold the same replicated shard."""
        ...


class Collectives:
    """Mode C: the functional wrappers bound to one group; `group=None` is the unsharded twin, size 1.

    `size` and `rank` are of this process in the group, read once here: forward code may use `size`, and must not use
    `rank`, which would differ between the graphs of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Sum over the group, same shape; backward is the identity for "I" and an all-reduce for "R"."""
        return collectives.all_reduce(x, group=self.group, dst=dst)

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Identity forward, all-reduce backward."""
        return collectives.copy_to_tp(x, group=self.group)

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """Size n of `dim` becomes n * size; backward is a reduce-scatter for "R" and the own shard for "I"."""
        return collectives.all_gather_single(x, dim=dim, group=self.group, dst=dst)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Size n of `dim` becomes n / size; backward is an all-gather."""
        return collectives.reduce_scatter_single(x, dim=dim, group=self.group)

    def scatter(self, x: Tensor, dim: int, src: Dst = "I") -> Tensor:
        """Size n of `dim` becomes n / size, no communication; backward is an all-gather for "I", zeros around for "R"."""
        return collectives.scatter_single(x, dim=dim, group=self.group, src=src)

    def rank_index(self, device: torch.device) -> Tensor:
        """`rank` as tensor data, [1] int64 on `device`, equal graphs on all ranks."""
        return collectives.rank_index(self.group, device)

    def replicas(self, count: int) -> Collectives:
        """Ranks k * count to (k + 1) * count - 1 of this group as a group of their own; all its ranks must call it."""
        return type(self)(neighbours(self.group, count))


class InPlaceCollectives(Collectives):
    """Mode B: in-place `dist.all_reduce` on the caller's buffer, no gradient contract, `copy_to_tp` is the identity."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Overwrite `x` with the sum over the group and return it; `dst` is ignored."""
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
        return x

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x


class DisabledCollectives(InPlaceCollectives):
    """Mode A: mode B's all-reduce under `torch.compiler.disable`, as serving code did to get past old Dynamo."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Overwrite `x` with the sum over the group and return it; breaks the graph here; `dst` is ignored."""
        return x if self.size == 1 else _disabled_all_reduce(x, self.group)


@torch.compiler.disable
def _disabled_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x
