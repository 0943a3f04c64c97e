"""Block configuration and a way to issue collectives -> the transformer block every mode and preset compiles."""

# B batch, S sequence, D model width, R = head size / 2 rotary pairs
from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.config import BlockConfig
from tpcompile.dist.strategies import TpComm
from tpcompile.evidence.records import Collective
from tpcompile.nn.attention import Attention
from tpcompile.nn.mlp import GeluMLP, SwiGLU
from tpcompile.nn.norm import RMSNorm
from tpcompile.nn.sharding import Declared


class TransformerBlock(nn.Module):
    """Pre-norm block, x + attention(norm(x)) then + mlp(norm(.)); `comm` of size 1 is the unsharded twin.

    Style `wan` has a GELU-tanh MLP, `llama` a SwiGLU; heads, norms, biases and mask follow the config. Weights are
    allocated, not initialised. Raises ConfigError when the size of `comm` does not divide heads, kv heads or ffn_dim.
    """

    def __init__(self, config: BlockConfig, comm: TpComm) -> None:
        super().__init__()
        config.check_tp(comm.size)
        dtype = getattr(torch, config.dtype)
        self.dim = config.dim
        self.tp_size = comm.size
        self.attention_norm = RMSNorm(config.dim, eps=config.eps, dtype=dtype)
        self.attention = Attention(config, comm)
        self.mlp_norm = RMSNorm(config.dim, eps=config.eps, dtype=dtype)
        self.mlp: GeluMLP | SwiGLU = GeluMLP(config, comm) if config.style == "wan" else SwiGLU(config, comm)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """[B, S, D], [S, E / 2], [S, E / 2] -> [B, S, D], replicated."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SR, sin_SR)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))

    def declared_collectives(
        self, batch: int, seq_len: int, dtype: torch.dtype | str, train: bool
    ) -> tuple[Collective, ...]:
        """Collectives mode C issues for an input [batch, seq_len, D], forward then (if `train`) backward, in order.

        `dtype` is a torch dtype or its name in a BlockConfig. Empty when the group has size 1.
        """
        return self.declared(batch, seq_len, _as_dtype(dtype)).select(train=train)

    def declared(self, batch: int, seq_len: int, dtype: torch.dtype) -> Declared:
        """The same, forward and backward apart."""
        if self.tp_size == 1:
            return Declared()
        shape = (batch, seq_len, self.dim)
        return self.attention.declared(shape, dtype).then(self.mlp.declared(shape, dtype))


class TransformerStack(nn.Module):
    """`num_layers` blocks in a row: the callable that is compiled."""

    def __init__(self, config: BlockConfig, comm: TpComm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(config, comm) for _ in range(config.num_layers))

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """[B, S, D], [S, E / 2], [S, E / 2] -> [B, S, D], replicated."""
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos_SR, sin_SR)
        return x_BSD

    def declared_collectives(
        self, batch: int, seq_len: int, dtype: torch.dtype | str, train: bool
    ) -> tuple[Collective, ...]:
        """Collectives of all blocks, as `TransformerBlock.declared_collectives`."""
        total = Declared()
        for layer in self.layers:
            assert isinstance(layer, TransformerBlock), type(layer)
            total = total.then(layer.declared(batch, seq_len, _as_dtype(dtype)))
        return total.select(train=train)


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
