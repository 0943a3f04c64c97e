"""adaLN: a table and a time embedding -> shift, scale and gate of both sublayers, as Wan applies them."""

# B batch, S sequence, D model width
from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.fastpath.plain import stat_dtype
from tpcompile.layout import ShardSpec
from tpcompile.nn.sharding import Declared, entered


class Modulation(nn.Module):
    """Table [1, 6, D] + embedding [B, 6, D] -> six tensors that broadcast over the tokens, in float32.

    Order: shift, scale, gate of attention, then of the MLP. In the sequence-parallel form every rank modulates
    different tokens, so the gradient of the sum is partial: it enters the region here, once for table and embedding.
    """

    def __init__(
        self, width: int, *, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False, comm: TpComm
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.table = nn.Parameter(torch.empty(1, 6, width, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Replicated."""
        return {"table": ShardSpec()}

    def forward(self, embedding_B6D: Tensor) -> tuple[Tensor, ...]:
        """[B, 6, D] -> six of [B, 1, D]; sequence parallel: six of [1, B, D]."""
        dtype = stat_dtype(embedding_B6D.dtype)
        sum_B6D = self.table.to(dtype) + embedding_B6D.to(dtype)
        if self.sequence_parallel:
            sum_B6D = self.comm.copy_to_tp(sum_B6D)  # identity; gradient partial -> replicated
        tokens_dim = 0 if self.sequence_parallel else 1
        return tuple(part_BD.unsqueeze(tokens_dim) for part_BD in sum_B6D.unbind(1))

    def declared(self, batch: int, dtype: torch.dtype) -> Declared:
        """Backward of the sequence-parallel form: the sum of the gradients."""
        shape = (batch, 6, self.table.shape[-1])
        return entered(shape, stat_dtype(dtype)) if self.sequence_parallel else Declared()
