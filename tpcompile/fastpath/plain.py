"""Plain code of norms, rotary embedding and modulation: what the block runs, and what fast paths replace."""

# B batch, S sequence, D normalised width, h heads, E head size, R = E / 2 rotary pairs
from __future__ import annotations

import torch
from torch import Tensor


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of norm statistics: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_of_squares(x_D: Tensor) -> Tensor:
    """[..., D] -> [..., 1] in `stat_dtype`."""
    return x_D.to(stat_dtype(x_D.dtype)).square().sum(-1, keepdim=True)


def normalized(x_D: Tensor, mean_square_1: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean square + eps) in the dtype of the statistic, cast back."""
    return (x_D.to(mean_square_1.dtype) * torch.rsqrt(mean_square_1 + eps)).to(x_D.dtype)


def rotate(x_BShE: Tensor, cos_SR: Tensor, sin_SR: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding in the tables' dtype, cast back; tables are [S, E / 2].

    Pairs are element i and i + E / 2 of a head, or 2i and 2i + 1 when `interleaved`. Real tables as inputs, because
    complex RoPE computed inside (as in Wan's own code) does not trace.
    """
    cos_S1R, sin_S1R = cos_SR.unsqueeze(1), sin_SR.unsqueeze(1)
    if interleaved:
        a_BShR, b_BShR = x_BShE.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a_BShR, b_BShR = x_BShE.chunk(2, -1)
    rotated = (a_BShR * cos_S1R - b_BShR * sin_S1R, b_BShR * cos_S1R + a_BShR * sin_S1R)
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return joined.to(x_BShE.dtype)
