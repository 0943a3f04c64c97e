"""Activations -> RMS-normalised activations, with the statistic each layout needs.

All of them normalise in float32 (float64 for float64), cast back, then multiply by the weight, as Wan does.
"""

# B batch, S sequence, D normalised width, E head size; d = D / tp and h = heads / tp are this rank's share.
# q and k may have different widths (grouped-query attention): d and c.
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tpcompile.dist.strategies import TpComm
from tpcompile.nn.sharding import Declared, ShardSpec, declared_sum, share_of, stat_dtype


class RMSNorm(nn.Module):
    """Norm of replicated activations; the weight is replicated and so is its gradient."""

    def __init__(self, width: int, *, eps: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Replicated."""
        return {"weight": ShardSpec("norm")}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return _normalize_last(x_BSD, self.eps) * self.weight


class DistributedRMSNorm(nn.Module):
    """Norm over the full width D of activations sharded on it: [B, S, D / tp] -> [B, S, D / tp].

    The sum of squares is all-reduced with dst="R": ranks scale different shards by it, so its gradient is partial.
    The mean divides by the global D, not by a mean of local means. Raises ConfigError when tp does not divide `width`.
    """

    def __init__(self, width: int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm = comm
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(share_of("width", width, size=comm.size), dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Sharded like the activations."""
        return {"weight": ShardSpec("norm", dim=0, parts=(self.width,))}

    def forward(self, x_BSd: Tensor) -> Tensor:
        """[B, S, D / tp] -> [B, S, D / tp], one all-reduce of [B, S, 1]."""
        sum_BS1 = self.comm.all_reduce(self.local_sum(x_BSd), dst="R")  # partial -> replicated, partial gradient
        return self.scale(x_BSd, sum_BS1)

    def local_sum(self, x_BSd: Tensor) -> Tensor:
        """Sum of squares of this rank's shard, [B, S, 1]."""
        return x_BSd.to(stat_dtype(x_BSd.dtype)).square().sum(-1, keepdim=True)

    def scale(self, x_BSd: Tensor, sum_BS1: Tensor) -> Tensor:
        """Normalise with the global sum of squares, cast back, multiply by the weight."""
        return _normalize(x_BSd, sum_BS1 / self.width, self.eps) * self.weight


class DistributedQKNorm(nn.Module):
    """`DistributedRMSNorm` of q and k with one packed all-reduce of [B, S, 2] instead of two.

    q is [B, S, D / tp] and k [B, S, C / tp], before the view into heads. Raises ConfigError as DistributedRMSNorm.
    """

    def __init__(
        self, q_width: int, k_width: int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.comm = comm
        self.q_norm = DistributedRMSNorm(q_width, eps=eps, comm=comm, dtype=dtype)
        self.k_norm = DistributedRMSNorm(k_width, eps=eps, comm=comm, dtype=dtype)

    def forward(self, q_BSd: Tensor, k_BSc: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes unchanged."""
        local_BS2 = torch.cat((self.q_norm.local_sum(q_BSd), self.k_norm.local_sum(k_BSc)), -1)
        sum_BS2 = self.comm.all_reduce(local_BS2, dst="R")  # partial -> replicated, partial gradient
        q_sum_BS1, k_sum_BS1 = sum_BS2.split(1, -1)
        return self.q_norm.scale(q_BSd, q_sum_BS1), self.k_norm.scale(k_BSc, k_sum_BS1)

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """One all-reduce of the two statistics in each direction."""
        shape = (*x_shape[:-1], 2)
        return Declared(*((declared_sum(p, shape, stat_dtype(dtype)),) for p in ("forward", "backward")))


class PerHeadRMSNorm(nn.Module):
    """Norm of each head on its own, [B, S, h * E] -> same; no statistic crosses ranks.

    The weight [E] is replicated but every rank applies it to other heads, so its gradient is partial on each rank:
    `copy_to_tp` on the parameter sums it, inside the one graph (a backward hook would break it).
    """

    def __init__(self, head_dim: int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm = comm
        self.eps = eps
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.empty(head_dim, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Replicated."""
        return {"weight": ShardSpec("norm")}

    def forward(self, x_BSd: Tensor) -> Tensor:
        """[B, S, h * E] -> [B, S, h * E]."""
        return self.scale(x_BSd, self.comm.copy_to_tp(self.weight))

    def scale(self, x_BSd: Tensor, weight_E: Tensor) -> Tensor:
        """Normalise every head and multiply by a weight that has entered the TP region."""
        x_BShE = x_BSd.unflatten(-1, (-1, self.head_dim))
        return (_normalize_last(x_BShE, self.eps) * weight_E).flatten(-2)


class PerHeadQKNorm(nn.Module):
    """`PerHeadRMSNorm` of q and k; the gradients of both weights travel in one packed all-reduce of [2, E]."""

    def __init__(self, head_dim: int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm = comm
        self.head_dim = head_dim
        self.q_norm = PerHeadRMSNorm(head_dim, eps=eps, comm=comm, dtype=dtype)
        self.k_norm = PerHeadRMSNorm(head_dim, eps=eps, comm=comm, dtype=dtype)

    def forward(self, q_BSd: Tensor, k_BSc: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes unchanged."""
        weights_2E = self.comm.copy_to_tp(torch.stack((self.q_norm.weight, self.k_norm.weight)))
        q_weight_E, k_weight_E = weights_2E.unbind(0)
        return self.q_norm.scale(q_BSd, q_weight_E), self.k_norm.scale(k_BSc, k_weight_E)

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Backward only: the sum of the weights' gradients."""
        return Declared(backward=(declared_sum("backward", (2, self.head_dim), dtype),))


def _normalize_last(x: Tensor, eps: float) -> Tensor:
    return _normalize(x, x.to(stat_dtype(x.dtype)).square().mean(-1, keepdim=True), eps)


def _normalize(x: Tensor, mean_square: Tensor, eps: float) -> Tensor:
    return (x.to(mean_square.dtype) * torch.rsqrt(mean_square + eps)).to(x.dtype)
