"""Gradients of norms and RoPE in plain code, in float32: what the ops register as their backward."""

# B batch, S sequence, h heads, E head size, R = E / 2, D normalised width
from __future__ import annotations

import torch
from torch import Tensor

from tpcompile.fastpath import plain


def turned_back(grad_BhSE: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Gradient of packed heads -> of the heads before RoPE, [B, S, h, E] float32."""
    grad_BShE = grad_BhSE.float().transpose(1, 2)
    return plain.rotate(grad_BShE, cos_SR.float(), -sin_SR.float(), interleaved=interleaved)


def rms_norm_backward(x_D: Tensor, weight_D: Tensor, grad_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, in float32, and of the weight, for a norm over the last dim."""
    wide_D = x_D.float()
    inverse_1 = torch.rsqrt(wide_D.square().mean(-1, keepdim=True) + eps)
    leading = tuple(range(x_D.dim() - 1))
    weight_grad_D = (grad_D * wide_D * inverse_1).sum(leading)
    scaled_D = grad_D * weight_D.float()
    shared_1 = (scaled_D * wide_D).mean(-1, keepdim=True) * inverse_1**3
    return scaled_D * inverse_1 - wide_D * shared_1, weight_grad_D.to(weight_D.dtype)
