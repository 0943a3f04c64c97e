"""Normalised activations and rotary tables -> attention output, heads sharded over the TP group."""

# B batch, S sequence, D model width, H query heads, G key and value heads, E head size, R = E / 2 rotary pairs
# h = H / tp and g = G / tp heads on this rank; d = h * E, c = g * E
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.config import BlockConfig
from tpcompile.dist.strategies import TpComm
from tpcompile.nn.linear import PackedColumnLinear, RowParallelLinear
from tpcompile.nn.norm import DistributedQKNorm, PerHeadQKNorm
from tpcompile.nn.sharding import Declared, declared_sum


class Attention(nn.Module):
    """Self-attention with packed q, k, v, RoPE, and grouped-query heads: [B, S, D] -> [B, S, D] replicated.

    Query head j reads key head j * G // H; contiguous shards of both keep that pairing on one rank. Raises ConfigError
    when tp does not divide the heads and the kv heads.
    """

    def __init__(self, config: BlockConfig, comm: TpComm) -> None:
        super().__init__()
        config.check_tp(comm.size)
        dtype = getattr(torch, config.dtype)
        q_width, kv_width = config.dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.causal = config.causal
        self.grouped = config.num_kv_heads != config.num_heads
        # Without a norm on q and k, equal skews would multiply in the logits; opposite ones cancel.
        k_skew = -config.num_kv_heads if config.qk_norm == "none" else config.num_kv_heads
        self.wqkv = PackedColumnLinear(
            config.dim,
            (q_width, kv_width, kv_width),
            bias=config.bias,
            comm=comm,
            dtype=dtype,
            head_skew=(config.num_heads, k_skew, 0),
        )
        self.qk_norm: DistributedQKNorm | PerHeadQKNorm | None = None
        if config.qk_norm == "full":
            self.qk_norm = DistributedQKNorm(q_width, kv_width, eps=config.eps, comm=comm, dtype=dtype)
        elif config.qk_norm == "per_head":
            self.qk_norm = PerHeadQKNorm(config.head_dim, eps=config.eps, comm=comm, dtype=dtype)
        self.wo = RowParallelLinear(config.dim, config.dim, bias=config.bias, comm=comm, dtype=dtype)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """[B, S, D], [S, E / 2], [S, E / 2] -> [B, S, D]."""
        q_BSd, k_BSc, v_BSc = self.wqkv(x_BSD)
        if self.qk_norm is not None:
            q_BSd, k_BSc = self.qk_norm(q_BSd, k_BSc)
        q_BhSE = rotate(self._heads(q_BSd), cos_SR, sin_SR).transpose(1, 2)
        k_BgSE = rotate(self._heads(k_BSc), cos_SR, sin_SR).transpose(1, 2)
        v_BgSE = self._heads(v_BSc).transpose(1, 2)
        o_BhSE = F.scaled_dot_product_attention(q_BhSE, k_BgSE, v_BgSE, is_causal=self.causal, enable_gqa=self.grouped)
        return self.wo(o_BhSE.transpose(1, 2).flatten(2))

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives of this module for an input of `x_shape`."""
        enter = Declared(backward=(declared_sum("backward", x_shape, dtype),))
        norm = Declared() if self.qk_norm is None else self.qk_norm.declared(x_shape, dtype)
        leave = Declared(forward=(declared_sum("forward", x_shape, dtype),))
        return enter.then(norm).then(leave)

    def _heads(self, x_BSd: Tensor) -> Tensor:
        return x_BSd.unflatten(-1, (-1, self.head_dim))


def rotate(x_BShE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotary embedding on the halves of each head, in the tables' dtype, cast back; tables are [S, E / 2].

    Real tables as inputs, because complex RoPE computed inside (as in Wan's own code) does not trace.
    """
    cos_S1R, sin_S1R = cos_SR.unsqueeze(1), sin_SR.unsqueeze(1)
    a_BShR, b_BShR = x_BShE.chunk(2, -1)
    rotated = (a_BShR * cos_S1R - b_BShR * sin_S1R, b_BShR * cos_S1R + a_BShR * sin_S1R)
    return torch.cat(rotated, -1).to(x_BShE.dtype)
