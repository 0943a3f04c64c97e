"""Replicated activations -> column-sharded activations -> replicated activations, by two kinds of linear.

Weights are allocated, not initialised: fill them with `tpcompile.nn.state.load_full_state_dict`.
"""

# I input features, O output features; i = I / tp and o = O / tp are this rank's share
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.dist.strategies import TpComm
from tpcompile.nn.sharding import ShardSpec, share_of


class _ColumnLinear(nn.Module):
    """Output features sharded, part by part; enters the TP region once however many parts are packed."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        bias: bool,
        comm: TpComm,
        dtype: torch.dtype,
        head_skew: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.comm = comm
        self.parts = tuple(parts)
        self.head_skew = tuple(head_skew)
        self.local_parts = tuple(share_of("out_features", part, size=comm.size) for part in parts)
        self.weight = nn.Parameter(torch.empty(sum(self.local_parts), in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(sum(self.local_parts), dtype=dtype)) if bias else None

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Rows of the weight and the bias are sharded, each packed part on its own."""
        specs = {"weight": ShardSpec("weight", dim=0, parts=self.parts, head_skew=self.head_skew)}
        if self.bias is not None:
            specs["bias"] = ShardSpec("bias", dim=0, parts=self.parts, head_skew=self.head_skew)
        return specs

    def _project(self, x_BSI: Tensor) -> Tensor:
        x_BSI = self.comm.copy_to_tp(x_BSI)  # identity; gradient partial -> replicated
        return F.linear(x_BSI, self.weight, self.bias)


class ColumnParallelLinear(_ColumnLinear):
    """[B, S, I] replicated -> [B, S, O / tp]; the gradient of the input is all-reduced.

    Raises ConfigError when tp does not divide `out_features`.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, comm: TpComm, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(in_features, (out_features,), bias=bias, comm=comm, dtype=dtype)

    def forward(self, x_BSI: Tensor) -> Tensor:
        """[B, S, I] -> [B, S, O / tp]."""
        return self._project(x_BSI)


class PackedColumnLinear(_ColumnLinear):
    """Several column-parallel linears of one input in one matmul: [B, S, I] -> one [B, S, part / tp] per part.

    The rows of rank r are its share of part 0, then its share of part 1, and so on. `head_skew` is a hint for test
    weights (see `ShardSpec`). Raises ConfigError when tp does not divide every part.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        bias: bool,
        comm: TpComm,
        dtype: torch.dtype = torch.float32,
        head_skew: Sequence[int] = (),
    ) -> None:
        super().__init__(in_features, parts, bias=bias, comm=comm, dtype=dtype, head_skew=head_skew)

    def forward(self, x_BSI: Tensor) -> tuple[Tensor, ...]:
        """[B, S, I] -> views of one output, in the order of the parts."""
        return self._project(x_BSI).split(self.local_parts, dim=-1)


class RowParallelLinear(nn.Module):
    """[B, S, I / tp] -> [B, S, O] replicated; the bias is added after the reduce, or it would count tp times.

    Raises ConfigError when tp does not divide `in_features`.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, comm: TpComm, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.comm = comm
        self.in_features = in_features
        local_features = share_of("in_features", in_features, size=comm.size)
        self.weight = nn.Parameter(torch.empty(out_features, local_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Columns of the weight are sharded, the bias is replicated."""
        specs = {"weight": ShardSpec("weight", dim=1, parts=(self.in_features,))}
        return specs if self.bias is None else specs | {"bias": ShardSpec("bias")}

    def forward(self, x_BSi: Tensor) -> Tensor:
        """[B, S, I / tp] -> [B, S, O]."""
        y_BSO = self.comm.all_reduce(F.linear(x_BSi, self.weight), dst="I")  # partial -> replicated
        return y_BSO if self.bias is None else y_BSO + self.bias
