"""Activations -> normalised activations, with the statistic each layout needs.

All of them normalise in float32 (float64 for float64), cast back, then multiply by the weight, as Wan and Llama do.
"""

# B batch, S sequence, D normalised width, E head size; d = D / tp and h = heads / tp are this rank's share.
# q and k may have different widths (grouped-query attention): d and c. Norms act on the last dim, whatever leads.
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.fastpath.plain import normalized, stat_dtype, sum_of_squares
from tpcompile.layout import Part, ShardSpec
from tpcompile.nn.sharding import Declared, entered, reduced


class _Norm(nn.Module):
    """Norm of whole vectors; the weight is replicated; none without `affine`.

    With `tokens_over` each rank has different tokens (sequence parallel), so the weight's gradient is partial and is
    summed over that group; without it all ranks repeat the same work, and the gradient is equal on all of them.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        affine: bool = True,
        dtype: torch.dtype = torch.float32,
        tokens_over: TpComm | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.tokens_over = tokens_over
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype)) if affine else None
        self.bias: nn.Parameter | None = None

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Every parameter is replicated."""
        return {name: ShardSpec() for name, _ in self.named_parameters()}

    def declared(self, dtype: torch.dtype) -> Declared:
        """Backward of the sequence-parallel form: the sum of the weight's gradient, packed with that of a bias."""
        if self.weight is None or self.tokens_over is None:
            return Declared()
        shape = self.weight.shape if self.bias is None else (2, *self.weight.shape)
        return entered(shape, dtype)


class RMSNorm(_Norm):
    """RMSNorm of whole vectors."""

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        normalized_D, weight_D = _normalize_last(x_D, self.eps), self.entered_weight()
        return normalized_D if weight_D is None else normalized_D * weight_D

    def entered_weight(self) -> Tensor | None:
        """The weight, [D], in the region where tokens are sharded."""
        if self.weight is None or self.tokens_over is None:
            return self.weight
        return self.tokens_over.copy_to_tp(self.weight)


class LayerNorm(_Norm):
    """LayerNorm of whole vectors in float32, as Wan's, with a bias where it has a weight."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.width = width
        self.bias = None if self.weight is None else nn.Parameter(torch.empty_like(self.weight))

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        weight, bias = self.weight, self.bias
        dtype = stat_dtype(x_D.dtype)
        if weight is not None and bias is not None:
            if self.tokens_over is not None:
                both_2D = self.tokens_over.copy_to_tp(torch.stack((weight, bias)))
                weight, bias = both_2D.unbind(0)
            weight, bias = weight.to(dtype), bias.to(dtype)
        y_D = F.layer_norm(x_D.to(dtype), (self.width,), weight, bias, self.eps)
        return y_D.to(x_D.dtype)


class DistributedRMSNorm(nn.Module):
    """Norm over the full width D of activations sharded on it: [..., D / tp] -> [..., D / tp].

    The sum of squares is all-reduced with dst="R": ranks scale different shards by it, so its gradient is partial. The
    mean divides by what was summed: the full width, times the replicas that count the same heads again; padding counts
    nothing. Raises ConfigError when tp does not divide the width, unless it is a padded `Part`.
    """

    def __init__(self, width: Part | int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm = comm
        self.layout = ShardSpec(dim=0, parts=(width,))
        part = self.layout.packed[0]
        self.num_summed = part.size * part.replicas
        self.replica_comm = comm.replicas(part.replicas)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(part.share(comm.size, "width"), dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Sharded like the activations."""
        return {"weight": self.layout}

    def forward(self, x_d: Tensor) -> Tensor:
        """[..., D / tp] -> [..., D / tp], one all-reduce of [..., 1]."""
        sum_1 = self.comm.all_reduce(sum_of_squares(x_d), dst="R")  # partial -> replicated, partial gradient
        return self.scale(x_d, sum_1)

    def scale(self, x_d: Tensor, sum_1: Tensor) -> Tensor:
        """Normalise with the global sum of squares, cast back, multiply by the weight."""
        return normalized(x_d, sum_1 / self.num_summed, self.eps) * self.replica_comm.copy_to_tp(self.weight)

    def declared(self, shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives for activations with the leading dims of `shape`."""
        return reduced((*shape[:-1], 1), stat_dtype(dtype), dst="R").then(self.declared_scale(dtype))

    def declared_scale(self, dtype: torch.dtype) -> Declared:
        """Collectives of `scale`: replicas see parts of the weight's gradient."""
        is_replicated = self.replica_comm.size > 1
        return entered(self.weight.shape, dtype, group="tp_replicas") if is_replicated else Declared()


class DistributedQKNorm(nn.Module):
    """`DistributedRMSNorm` of q and k with one packed all-reduce of [..., 2] instead of two.

    q is [..., D / tp] and k [..., C / tp], before the view into heads. Raises ConfigError as DistributedRMSNorm.
    """

    path: ClassVar = "qk_norm_rope"
    alone: ClassVar = "qkv_pack_rmsnorm_rope"

    def __init__(
        self, q_width: Part | int, k_width: Part | int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.comm = comm
        self.q_norm = DistributedRMSNorm(q_width, eps=eps, comm=comm, dtype=dtype)
        self.k_norm = DistributedRMSNorm(k_width, eps=eps, comm=comm, dtype=dtype)

    def forward(self, q_d: Tensor, k_c: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes unchanged."""
        local_2 = torch.cat((sum_of_squares(q_d), sum_of_squares(k_c)), -1)
        sum_2 = self.comm.all_reduce(local_2, dst="R")  # partial -> replicated, partial gradient
        q_sum_1, k_sum_1 = sum_2.split(1, -1)
        return self.q_norm.scale(q_d, q_sum_1), self.k_norm.scale(k_c, k_sum_1)

    def rotated(
        self,
        q_BSd: Tensor,
        k_BSc: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        fast_path: Callable[..., Any],
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Norm and RoPE by a fast path: -> [B, h, S, E], [B, g, S, E].

        The fast path is `qk_norm_rope`, or, with an `exchange`, `qk_norm_rope_exchange`, which sums within its kernel.
        """
        q_norm, k_norm = self.q_norm, self.k_norm
        weights = (norm.replica_comm.copy_to_tp(norm.weight) for norm in (q_norm, k_norm))
        counts = (q_norm.num_summed, k_norm.num_summed)
        if "exchange" not in options:
            options["all_reduce"] = partial(self.comm.all_reduce, dst="R")  # partial -> replicated, partial gradient
        return fast_path(q_BSd, k_BSc, *weights, cos_SR, sin_SR, counts=counts, eps=q_norm.eps, **options)

    def rotated_packed(
        self, qkv: Tensor, cos_SR: Tensor, sin_SR: Tensor, fast_path: Callable[..., Any], **layout: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and RoPE by the fast path `qkv_pack_rmsnorm_rope`, which is right on one GPU only: -> q, k, v.

        [B, S, d + 2 c] -> [B, h, S, E], and twice [B, g, S, E].
        """
        weights = (self.q_norm.weight, self.k_norm.weight)
        return fast_path(qkv, *weights, cos_SR, sin_SR, eps=self.q_norm.eps, **layout)

    def declared(self, shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """One all-reduce of the two statistics in each direction."""
        statistics = reduced((*shape[:-1], 2), stat_dtype(dtype), dst="R")
        return statistics.then(self.q_norm.declared_scale(dtype)).then(self.k_norm.declared_scale(dtype))


class PerHeadRMSNorm(nn.Module):
    """Norm of each head on its own, [..., h * E] -> same; no statistic crosses ranks.

    The weight [E] is replicated but every rank applies it to different heads, so its gradient is partial on each rank:
    `copy_to_tp` on the parameter sums it, inside the one graph (a backward hook would break it). Heads that `replicas`
    ranks hold are used by different query heads on each, so theirs is partial in the same way.
    """

    def __init__(self, head_dim: int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm = comm
        self.eps = eps
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.empty(head_dim, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Replicated."""
        return {"weight": ShardSpec()}

    def forward(self, x_d: Tensor) -> Tensor:
        """[..., h * E] -> [..., h * E]."""
        return self.scale(x_d, self.comm.copy_to_tp(self.weight))

    def scale(self, x_d: Tensor, weight_E: Tensor) -> Tensor:
        """Normalise every head and multiply by a weight that has entered the TP region."""
        x_hE = x_d.unflatten(-1, (-1, self.head_dim))
        return (_normalize_last(x_hE, self.eps) * weight_E).flatten(-2)

    def declared(self, shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Backward only: the sum of the weight's gradient."""
        return entered((self.head_dim,), dtype)


class PerHeadQKNorm(nn.Module):
    """`PerHeadRMSNorm` of q and k; the gradients of both weights travel in one packed all-reduce of [2, E]."""

    path: ClassVar = "qk_head_norm_rope"

    def __init__(self, head_dim: int, *, eps: float, comm: TpComm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm = comm
        self.head_dim = head_dim
        self.q_norm = PerHeadRMSNorm(head_dim, eps=eps, comm=comm, dtype=dtype)
        self.k_norm = PerHeadRMSNorm(head_dim, eps=eps, comm=comm, dtype=dtype)

    def forward(self, q_d: Tensor, k_c: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes unchanged."""
        q_weight_E, k_weight_E = self._entered_weights()
        return self.q_norm.scale(q_d, q_weight_E), self.k_norm.scale(k_c, k_weight_E)

    def rotated(
        self,
        q_BSd: Tensor,
        k_BSc: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        fast_path: Callable[..., Any],
        **layout: bool,
    ) -> tuple[Tensor, Tensor]:
        """Norm and RoPE by the fast path `qk_head_norm_rope`: -> [B, h, S, E], [B, g, S, E]."""
        return fast_path(q_BSd, k_BSc, *self._entered_weights(), cos_SR, sin_SR, eps=self.q_norm.eps, **layout)

    def declared(self, shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Backward only: the sum of the weights' gradients."""
        return entered((2, self.head_dim), dtype)

    def _entered_weights(self) -> tuple[Tensor, ...]:
        return self.comm.copy_to_tp(torch.stack((self.q_norm.weight, self.k_norm.weight))).unbind(0)


def _normalize_last(x: Tensor, eps: float) -> Tensor:
    return normalized(x, x.to(stat_dtype(x.dtype)).square().mean(-1, keepdim=True), eps)
