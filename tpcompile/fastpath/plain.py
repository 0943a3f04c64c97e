"""Plain code of norms, rotary embedding, modulation, activations: what the block runs, and what fast paths replace."""

# B batch, S sequence, D normalised width, h heads, E head size, R = E / 2 rotary pairs,
# I input features, f hidden features
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Partial sums -> their sum over the ranks, with a partial gradient: `comm.all_reduce(x, dst="R")`."""


def alone(partial: Tensor) -> Tensor:
    """The all-reduce of a group of one."""
    return partial


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


def qk_norm_rope(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    counts: tuple[int, int],
    eps: float,
    interleaved: bool = False,
    all_reduce: AllReduce = alone,
) -> tuple[Tensor, Tensor]:
    """Norm of q and k over their full widths, weight, RoPE: [B, S, d], [B, S, c] -> [B, h, S, E], [B, g, S, E].

    `counts` are the numbers that the sums of squares of q and k run over, on all ranks. The sums travel in one
    all-reduce of [B, S, 2], whose gradient is partial (dst="R").
    """
    sums_BS2 = all_reduce(torch.cat((sum_of_squares(q_BSd), sum_of_squares(k_BSc)), -1))
    outputs = []
    for x, sum_1, count, weight in zip(
        (q_BSd, k_BSc), sums_BS2.split(1, -1), counts, (q_weight_d, k_weight_c), strict=True
    ):
        heads_BShE = (normalized(x, sum_1 / count, eps) * weight).unflatten(-1, (-1, 2 * cos_SR.shape[-1]))
        outputs.append(rotate(heads_BShE, cos_SR, sin_SR, interleaved=interleaved).transpose(1, 2))
    return outputs[0], outputs[1]


def qk_head_norm_rope(
    q_BSd: Tensor,
    k_BSc: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    eps: float,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm of every head on its own, weight, RoPE: [B, S, d], [B, S, c] -> [B, h, S, E], [B, g, S, E]."""
    size = 2 * cos_SR.shape[-1]
    q_BShE, k_BSgE = q_BSd.unflatten(-1, (-1, size)), k_BSc.unflatten(-1, (-1, size))
    q_BShE = normalized(q_BShE, sum_of_squares(q_BShE) / size, eps) * q_weight_E
    k_BSgE = normalized(k_BSgE, sum_of_squares(k_BSgE) / size, eps) * k_weight_E
    q_BSd, k_BSc = q_BShE.flatten(-2), k_BSgE.flatten(-2)
    return _packed(q_BSd, cos_SR, sin_SR, interleaved), _packed(k_BSc, cos_SR, sin_SR, interleaved)


def add_rms_norm(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """(x + branch, its norm over the last dim times the weight)."""
    sum_D = x_D + branch_D
    mean_square_1 = sum_of_squares(sum_D) / sum_D.shape[-1]
    return sum_D, normalized(sum_D, mean_square_1, eps) * weight_D


def all_reduce_add_rms_norm(
    x_D: Tensor, partial_D: Tensor, weight_D: Tensor, *, eps: float, all_reduce: AllReduce = alone
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of x and the sum over the ranks of a row-parallel output."""
    return add_rms_norm(x_D, all_reduce(partial_D), weight_D, eps=eps)


def add_modulated_norm(
    x_BSD: Tensor, branch_BSD: Tensor, gate_BD: Tensor, shift_BD: Tensor, scale_BD: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + branch * gate, its LayerNorm times 1 + scale plus shift), in the dtype of the modulation, cast back."""
    gate_B1D, shift_B1D, scale_B1D = (part_BD.unsqueeze(1) for part_BD in (gate_BD, shift_BD, scale_BD))
    sum_BSD = (x_BSD.to(gate_BD.dtype) + branch_BSD.to(gate_BD.dtype) * gate_B1D).to(x_BSD.dtype)
    normed_BSD = F.layer_norm(sum_BSD.to(scale_BD.dtype), sum_BSD.shape[-1:], eps=eps)
    return sum_BSD, (normed_BSD * (1 + scale_B1D) + shift_B1D).to(x_BSD.dtype)


def gelu_tanh(x_f: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x_f, approximate="tanh")


def few_rows_linear(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, gelu: bool = False) -> Tensor:
    """Linear, for a few tokens, then `gelu_tanh` where asked for; partial where the input features are sharded."""
    out_O = F.linear(x_I, weight_OI, bias_O)
    return gelu_tanh(out_O) if gelu else out_O


def linear_gelu_tanh(x_I: Tensor, weight_fI: Tensor, bias_f: Tensor) -> Tensor:
    """Linear with a bias, then `gelu_tanh`."""
    return gelu_tanh(F.linear(x_I, weight_fI, bias_f))


def silu_mul(gate_f: Tensor, up_f: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate_f) * up_f


def qkv_pack(
    qkv: Tensor,
    q_weight_d: Tensor,
    k_weight_c: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    *,
    eps: float,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of one GPU as `qk_norm_rope`, v as [B, g, S, E]: from one packed projection, [B, S, d + 2 c]."""
    widths = (q_weight_d.shape[0], k_weight_c.shape[0])
    q_BSd, k_BSc, v_BSc = qkv.split([*widths, widths[1]], -1)
    q_BhSE, k_BgSE = qk_norm_rope(
        q_BSd, k_BSc, q_weight_d, k_weight_c, cos_SR, sin_SR, counts=widths, eps=eps, interleaved=interleaved
    )
    return q_BhSE, k_BgSE, v_BSc.unflatten(-1, (-1, 2 * cos_SR.shape[-1])).transpose(1, 2)


def _packed(x_BSd: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Rotated, [B, S, h * E] -> [B, h, S, E]."""
    x_BShE = x_BSd.unflatten(-1, (-1, 2 * cos_SR.shape[-1]))
    return rotate(x_BShE, cos_SR, sin_SR, interleaved=interleaved).transpose(1, 2)
