"""Normalised activations -> MLP output, hidden features sharded over the TP group."""

# B batch, S sequence, D model width, F hidden width; f = F / tp is this rank's share
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.config import BlockConfig
from tpcompile.dist.strategies import TpComm
from tpcompile.nn.linear import ColumnParallelLinear, PackedColumnLinear, RowParallelLinear
from tpcompile.nn.sharding import Declared, declared_sum


class GeluMLP(nn.Module):
    """Linear, GELU (tanh form, as Wan), linear: [B, S, D] -> [B, S, D] replicated."""

    def __init__(self, config: BlockConfig, comm: TpComm) -> None:
        super().__init__()
        dtype = getattr(torch, config.dtype)
        self.up = ColumnParallelLinear(config.dim, config.ffn_dim, bias=config.bias, comm=comm, dtype=dtype)
        self.down = RowParallelLinear(config.ffn_dim, config.dim, bias=config.bias, comm=comm, dtype=dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h_BSf = F.gelu(self.up(x_BSD), approximate="tanh")
        return self.down(h_BSf)

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives of this module for an input of `x_shape`."""
        return _enter_and_leave(x_shape, dtype)


class SwiGLU(nn.Module):
    """silu(gate) * up, then down, gate and up packed in one matmul: [B, S, D] -> [B, S, D] replicated."""

    def __init__(self, config: BlockConfig, comm: TpComm) -> None:
        super().__init__()
        dtype = getattr(torch, config.dtype)
        parts = (config.ffn_dim, config.ffn_dim)
        self.gate_up = PackedColumnLinear(config.dim, parts, bias=config.bias, comm=comm, dtype=dtype)
        self.down = RowParallelLinear(config.ffn_dim, config.dim, bias=config.bias, comm=comm, dtype=dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        gate_BSf, up_BSf = self.gate_up(x_BSD)
        return self.down(F.silu(gate_BSf) * up_BSf)

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives of this module for an input of `x_shape`."""
        return _enter_and_leave(x_shape, dtype)


def _enter_and_leave(x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
    return Declared(
        forward=(declared_sum("forward", x_shape, dtype),), backward=(declared_sum("backward", x_shape, dtype),)
    )
