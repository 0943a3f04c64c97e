"""Both matmuls of a feed-forward and silu(gate) * up between them in one Triton kernel: what Inductor does not make."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# T tokens, D model dim, H hidden dim
BLOCK_T, BLOCK_H, BLOCK_D = 32, 64, 128


@triton.jit
def gate_and_up(
    x_TD, gate_HD, gate_bias_H, up_HD, up_bias_H, out_TH, T, H, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = silu(x @ gate.T + gate_bias) * (x @ up.T + up_bias); one program per block of tokens and hidden dims."""
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_token, is_hidden = t[:, None] < T, h < H
    gate = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_TD + t[:, None] * D + d[None], mask=is_token, other=0.0)
        at = h[None] * D + d[:, None]
        gate = tl.dot(x, tl.load(gate_HD + at, mask=is_hidden[None], other=0.0), gate)
        up = tl.dot(x, tl.load(up_HD + at, mask=is_hidden[None], other=0.0), up)
    gate += tl.load(gate_bias_H + h, mask=is_hidden, other=0.0).to(tl.float32)[None]
    up += tl.load(up_bias_H + h, mask=is_hidden, other=0.0).to(tl.float32)[None]
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_TH + t[:, None] * H + h[None], out.to(out_TH.dtype.element_ty), mask=is_token & is_hidden[None])


def feed_forward(x: Tensor, *weights: Any) -> Tensor:
    """The same as `walk_through.feed_forward`: a norm, this kernel, a matmul."""
    scale, shift, gate, gate_bias, up, up_bias, down, down_bias = weights
    y = F.layer_norm(x, scale.shape, scale, shift)
    tokens, hidden = len(x), len(gate)
    out = torch.empty(tokens, hidden, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(hidden, BLOCK_H), triton.cdiv(tokens, BLOCK_T))
    gate_and_up[grid](
        y, gate, gate_bias, up, up_bias, out, tokens, hidden, y.shape[1], BLOCK_T, BLOCK_H, BLOCK_D, num_warps=4
    )
    return F.linear(out, down, down_bias)
