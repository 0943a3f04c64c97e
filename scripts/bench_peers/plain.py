"""Block configuration -> its mathematics as a plain module of torch.nn, which knows nothing of ranks.

Peers parallelise it as their users would: by a DTensor plan, or by slices of the weights and hooks. It holds the same
numbers as our stack; q, k and v are three linears, as in the models that DTensor plans are written for, or one packed
linear, as in gpt-fast. No modulation, cross-attention, mask or dropout.
"""

# B batch, S sequence, D model width, H heads, E head size, R = E / 2 rotary pairs
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError
from tpcompile.fastpath.plain import normalized, rotate, stat_dtype

NOT_PLAIN = {
    "norm": "rms", "norm_affine": True, "modulation": False, "cross_attention": False, "masked": False,
    "sequence_parallel": False, "dropout": 0.0,
}  # fmt: skip
"""The forms of the block that this module has."""


def check_plain(block: BlockConfig, tp: int) -> None:
    """Raises ConfigError for a block of a different form, and for sizes that tp does not divide."""
    others = {key: getattr(block, key) for key, plain in NOT_PLAIN.items() if getattr(block, key) != plain}
    if others:
        raise ConfigError(f"peers have no {', '.join(f'{key}={value}' for key, value in others.items())}")
    if block.num_kv_heads % tp or block.num_heads % tp or block.ffn_dim % tp:
        raise ConfigError(f"peers need heads, kv heads and ffn_dim that tp={tp} divides")


class MeanSquare(nn.Module):
    """[..., D] -> [..., 1] in the dtype of statistics; a module, so that a hook can average it over ranks."""

    def forward(self, x_D: Tensor) -> Tensor:
        """Mean of the squares over the last dim."""
        return x_D.to(stat_dtype(x_D.dtype)).square().mean(-1, keepdim=True)


class RMSNorm(nn.Module):
    """Over the last dim, which may be a shard when `mean_square` is made to see all of it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.mean_square = MeanSquare()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_D: Tensor) -> Tensor:
        """Shape unchanged."""
        return normalized(x_D, self.mean_square(x_D), self.eps) * self.weight


class Attention(nn.Module):
    """[B, S, D] -> [B, S, D]; the number of heads follows the widths of its linears."""

    def __init__(self, config: BlockConfig, *, packed: bool) -> None:
        super().__init__()
        self.head_dim, self.causal = config.head_dim, config.causal
        self.interleaved = config.rope == "interleaved"
        self.grouped = config.num_heads != config.num_kv_heads
        self.norms_heads = config.qk_norm == "per_head"
        q, kv = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.widths = (q, kv, kv)
        self.wqkv: nn.Linear | None = None
        if packed:
            self.wqkv = nn.Linear(config.dim, sum(self.widths), bias=config.bias)
        else:
            self.wq = nn.Linear(config.dim, q, bias=config.bias)
            self.wk = nn.Linear(config.dim, kv, bias=config.bias)
            self.wv = nn.Linear(config.dim, kv, bias=config.bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            q_width, k_width = (self.head_dim,) * 2 if self.norms_heads else (q, kv)
            self.q_norm, self.k_norm = RMSNorm(q_width, config.eps), RMSNorm(k_width, config.eps)
        self.wo = nn.Linear(q, config.dim, bias=config.bias)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Norms of q and k, RoPE, softmax(q k / sqrt(E)) v."""
        if self.wqkv is not None:
            q, k, v = self.wqkv(x_BSD).split(self.widths, -1)
        else:
            q, k, v = self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD)
        q_BSHE, k_BSGE = self._rotated(q, self.q_norm, cos_SR, sin_SR), self._rotated(k, self.k_norm, cos_SR, sin_SR)
        heads = (q_BSHE.transpose(1, 2), k_BSGE.transpose(1, 2), self._heads(v).transpose(1, 2))
        o_BHSE = F.scaled_dot_product_attention(*heads, is_causal=self.causal, enable_gqa=self.grouped)
        return self.wo(o_BHSE.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor, norm: RMSNorm | None, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        if norm is not None and not self.norms_heads:
            x = norm(x)
        x_BSHE = self._heads(x)
        if norm is not None and self.norms_heads:
            x_BSHE = norm(x_BSHE)
        return rotate(x_BSHE, cos_SR, sin_SR, interleaved=self.interleaved)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """GELU (tanh) of one linear, or silu(gate) * up, then down: [B, S, D] -> [B, S, D]."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate: nn.Linear | None = None
        if config.style == "llama":
            self.gate = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=config.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Shape unchanged."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(.))."""

    def __init__(self, config: BlockConfig, *, packed: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.eps)
        self.attention = Attention(config, packed=packed)
        self.mlp_norm = RMSNorm(config.dim, config.eps)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SR, sin_SR)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Stack(nn.Module):
    """Blocks in a row: [B, S, D] and RoPE tables [S, E / 2] -> [B, S, D]."""

    def __init__(self, config: BlockConfig, *, packed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, packed=packed) for _ in range(config.num_layers))

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Through all blocks."""
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos_SR, sin_SR)
        return x_BSD


def plain_state(full: Mapping[str, Any], config: BlockConfig, *, packed: bool = False) -> dict[str, Tensor]:
    """Tensors of our stack by name -> those of the plain one: views of the same numbers.

    Gradients of weights have the same names and parts. Names that are not there are left out.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"mlp.gate_up": {"mlp.gate": config.ffn_dim, "mlp.up": config.ffn_dim}}
    if not packed:
        parts["attention.wqkv"] = {"attention.wq": q, "attention.wk": kv, "attention.wv": kv}
    found: dict[str, Tensor] = {}
    for name, tensor in full.items():
        prefix, _, own = name.partition("layers.")[2].partition(".")
        module, _, kind = own.replace("attention.qk_norm.", "attention.").rpartition(".")
        widths = parts.get(module, {module: tensor.shape[0]})
        for part, piece in zip(widths, tensor.split(list(widths.values())), strict=True):
            found[f"layers.{prefix}.{part}.{kind}"] = piece
    return found
