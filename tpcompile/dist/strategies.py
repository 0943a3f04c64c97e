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


class TpComm(Protocol):
    """What a parallel module needs: sizes to build itself, and the two operations its forward issues."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Sum over the group; the caller owns `x` and does not use it again."""
        ...

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Enter a tensor-parallel region."""
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
