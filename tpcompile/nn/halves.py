"""Blocks in a row whose tokens go in two halves between attentions: sums over the ranks run beside other work.

An all-reduce is asked for as soon as a half has its part of it, and waited for when the same half goes on; the other is
at work in between. Attention reads the keys of all tokens, and is one for both halves. Numbers are those of all tokens
at once, to the rounding of matrix products of a different height.
"""

# B batch, S sequence, D model width, s tokens of a half
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpcompile.collectives.asynchronous import Pending
from tpcompile.nn.sharding import Declared

if TYPE_CHECKING:
    from tpcompile.nn.block import TransformerBlock

_TILE = 128
"""Rows of a tile of a matrix product on a GPU: no tile should be shared by the halves."""


@dataclass(frozen=True)
class Leaving:
    """What the MLP of a block has left for a half to add."""

    layer: TransformerBlock
    summed: Pending
    gate: Tensor | None

    def joined(self, x_BsD: Tensor) -> Tensor:
        """x + branch * gate, as that block adds them."""
        return self.layer.joined(x_BsD, self.summed.wait(), self.gate)


def lengths(num_tokens: int) -> tuple[int, int]:
    """Tokens of the two halves; the first is whole tiles where there are many."""
    unit = _TILE if num_tokens >= 4 * _TILE else 1
    first = -(-num_tokens // (2 * unit)) * unit
    return first, num_tokens - first


def through_halves(
    layers: Iterable[Any],
    x_BSD: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    modulation_B6D: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """[B, S, D] -> [B, S, D], replicated, through `TransformerBlock`s; arguments as `BlockInputs`."""
    sizes = lengths(x_BSD.shape[1])
    halves = list(x_BSD.split(sizes, dim=1))
    left: list[Leaving] = []
    for layer in layers:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = layer.modulated(modulation_B6D)
        projected = []
        for i in range(2):
            if left:
                halves[i] = left[i].joined(halves[i])
            projected.append(layer.attention.wqkv.packed(layer.normed_for_attention(halves[i], shift, scale)))
        o_BSd = layer.attention.attended(torch.cat(projected, dim=1), cos_SR, sin_SR, mask=mask)
        summed = [layer.attention.wo.start(o_Bsd) for o_Bsd in o_BSd.split(sizes, dim=1)]
        left = []
        for i in range(2):
            branch = summed[i].wait()
            halves[i], h_BsD = layer.joined_and_normed(halves[i], branch, gate, mlp_shift, mlp_scale)
            left.append(Leaving(layer, layer.mlp.start(h_BsD), mlp_gate))
    return torch.cat([half.joined(x_BsD) for half, x_BsD in zip(left, halves, strict=True)], dim=1)


def declared_halves(layer: TransformerBlock, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
    """Collectives of a block for a full shape [B, S, D] of its input; forward only."""
    batch, seq_len, width = x_shape
    shapes = [(batch, tokens, width) for tokens in lengths(seq_len)]
    total = layer.attention.declared(x_shape, dtype, reduce=False)
    for shape in shapes:
        total = total.then(layer.attention.wo.declared(shape, dtype))
    for shape in shapes:
        total = total.then(layer.mlp.declared(shape, dtype))
    return total
