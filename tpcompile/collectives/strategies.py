"""Mode A, B or C -> how a model issues its collectives; the code of the model is the same in all three.

mode   class                  collectives                                gradient
A      DisabledCollectives    in-place, hidden from Dynamo               none stated: breaks the graph at every call
B      InPlaceCollectives     in-place, rewritten by Dynamo              none stated: x group size under compile
C      Collectives            tpcompile.collectives.api                 stated by dst, equal in eager and compiled
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives import api as collectives
from tpcompile.collectives.api import Dst
from tpcompile.collectives.issue import joined, stacked
from tpcompile.ranks.groups import GroupLike, neighbours, rank_index, resolve_group
from tpcompile.torch_api.c10d import REDUCE_OPS


class Collectives:
    """Mode C: the functional wrappers bound to one group; `group=None` is the unsharded module, size 1.

    The interface that a parallel module gets: its place in the group, and the collectives of its forward. Of an input
    of `all_reduce` and `all_max` the caller gives up ownership: mode A and B overwrite it.

    A group is a ProcessGroup, its name, a 1-D DeviceMesh such as `mesh["tp"]`, or `(mesh, dim)`.
    `size` and `rank` are of this process in the group, read once here: forward code may use `size`, and must not use
    `rank`, which would differ between the graphs of the ranks.
    """

    def __init__(self, group: GroupLike) -> None:
        found = resolve_group(group)
        self.group = found
        self.size: int = 1 if found is None else found.size()
        self.rank: int = 0 if found is None else found.rank()

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Sum over the group, same shape; backward is the identity for "I" and an all-reduce for "R"."""
        return collectives.all_reduce(x, group=self.group, dst=dst)

    def all_max(self, x: Tensor) -> Tensor:
        """Maximum over the group, same shape, no gradient; a method, so that faults may replace `all_reduce` alone."""
        return collectives.all_reduce(x.detach(), group=self.group, op="max")

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Identity forward, all-reduce backward."""
        return collectives.copy_to_tp(x, group=self.group)

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """Size n of `dim` becomes n * size; backward is a reduce-scatter for "R", and this rank's shard for "I"."""
        return collectives.all_gather_single(x, dim=dim, group=self.group, dst=dst)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Size n of `dim` becomes n / size; backward is an all-gather."""
        return collectives.reduce_scatter_single(x, dim=dim, group=self.group)

    def scatter(self, x: Tensor, dim: int, src: Dst = "I") -> Tensor:
        """Size n of `dim` becomes n / size, no communication; backward all-gather for "I", zero padding for "R"."""
        return collectives.scatter_single(x, dim=dim, group=self.group, src=src)

    def rank_index(self, device: torch.device) -> Tensor:
        """`rank` as tensor data, [1] int64 on `device`, equal graphs on all ranks."""
        return rank_index(self.group, device)

    def replicas(self, count: int) -> Collectives:
        """The subgroup of this rank: ranks k * count to (k + 1) * count - 1; all ranks of the group must call it."""
        return Collectives(neighbours(self.group, count))


TpComm: TypeAlias = Collectives
"""What a module is given: the collectives of any mode."""

# torch 2.13 renamed the two and warns at every call of the old names.
_all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _reduced(x: Tensor, op: str, group: dist.ProcessGroup | None) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, op=REDUCE_OPS[op], group=group)
    return x


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    world = dist.get_world_size(group)
    out = x.new_empty((world * x.shape[0], *x.shape[1:]))
    _all_gather_into(out, x.contiguous(), group=group)
    return joined(out, dim, world)


def _reduce_scattered(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    world = dist.get_world_size(group)
    parts = stacked(x, dim, world).contiguous()
    out = parts.new_empty((parts.shape[0] // world, *parts.shape[1:]))
    _reduce_scatter_into(out, parts, group=group)
    return out


class InPlaceCollectives(Collectives):
    """Mode B: in-place `torch.distributed` calls without a stated gradient; `copy_to_tp` is the identity.

    `scatter` and `rank_index` do not communicate and are those of mode C.
    """

    _reduce = staticmethod(_reduced)
    _gather = staticmethod(_gathered)
    _reduce_scatter = staticmethod(_reduce_scattered)

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """Overwrite `x` with the sum over the group and return it; `dst` is ignored."""
        return x if self.size == 1 else self._reduce(x, "sum", self.group)

    def all_max(self, x: Tensor) -> Tensor:
        """Overwrite `x` with the maximum over the group and return it, without gradient."""
        return x.detach() if self.size == 1 else self._reduce(x.detach(), "max", self.group)

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """Size n of `dim` becomes n * size, into a new buffer; `dst` is ignored."""
        return x if self.size == 1 else self._gather(x, dim % x.dim(), self.group)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Size n of `dim` becomes n / size, into a new buffer."""
        return x if self.size == 1 else self._reduce_scatter(x, dim % x.dim(), self.group)


class DisabledCollectives(InPlaceCollectives):
    """Mode A: the collectives of mode B under `torch.compiler.disable`, as serving code used them with old Dynamo.

    Each of them breaks the graph.
    """

    _reduce = staticmethod(torch.compiler.disable(_reduced))
    _gather = staticmethod(torch.compiler.disable(_gathered))
    _reduce_scatter = staticmethod(torch.compiler.disable(_reduce_scattered))
