"""Head size and positions -> cos and sin tables for `tpcompile.fastpath.plain.rotate`, computed in float64.

One table serves both pairings of RoPE, "half" (Llama, Qwen3) and "interleaved" (Wan): pair i turns by the same angle,
only the elements that form the pair differ.
"""

# S positions, E head size, R = E / 2 rotary pairs
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tpcompile.errors import ConfigError


def rope_tables(
    head_dim: int,
    seq_len: int,
    *,
    base: float = 10000.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base ** (-2 i / E), [S, E / 2] each. Raises ConfigError for an odd head size.

    Source: Su et al. 2021, arXiv 2104.09864, equation 15.
    """
    return tables_of(frequencies(head_dim, base=base, device=device), seq_len, dtype=dtype)


def frequencies(head_dim: int, *, base: float, device: torch.device | str = "cpu") -> Tensor:
    """base ** (-2 i / E) in radians per position, [E / 2] float64. Raises ConfigError for an odd head size."""
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"RoPE rotates pairs; {head_dim} elements do not make pairs, choose an even number")
    pairs_R = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
    return base ** (-pairs_R / pairs_R.numel())


def llama3_frequencies(
    frequencies_R: Tensor, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_len: int
) -> Tensor:
    """Frequencies for a longer context, as Llama 3.1: slow pairs by `factor`, fast ones kept, a blend in between.

    A pair counts as slow when it turns less than `low_freq_factor` times in `original_len` positions, as fast above
    `high_freq_factor`. Source: `apply_scaling` of Meta's llama-models, and rope type "llama3" of transformers.
    """
    turns_R = original_len * frequencies_R / (2 * math.pi)
    kept_R = ((turns_R - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies_R * (kept_R + (1 - kept_R) / factor)


def tables_of(frequencies_R: Tensor, seq_len: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency for positions 0 to S - 1, [S, R] each."""
    positions_S = torch.arange(seq_len, device=frequencies_R.device, dtype=frequencies_R.dtype)
    angles_SR = positions_S[:, None] * frequencies_R
    return angles_SR.cos().to(dtype), angles_SR.sin().to(dtype)


def video_rope_tables(
    head_dim: int,
    grid: Sequence[int],
    *,
    base: float = 10000.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, E / 2] for the tokens of a video, `grid` = (frames, rows, columns) of patches, columns fastest.

    As Wan 2.1: rows and columns get 2 * (E // 6) elements of a head each, frames the rest, and every axis its own
    frequencies. Raises ConfigError unless `grid` has three sizes and E is even and at least 6.
    """
    if len(grid) != 3 or min(grid) < 1 or head_dim < 6:
        raise ConfigError(f"grid={tuple(grid)}, head size {head_dim}: pass (frames, rows, columns) and at least 6")
    plane = 2 * (head_dim // 6)
    widths = (head_dim - 2 * plane, plane, plane)
    axes = zip(grid, widths, strict=True)
    angles = []
    for axis, (size, width) in enumerate(axes):
        positions = torch.arange(size, device=device, dtype=torch.float64)
        own = positions[:, None] * frequencies(width, base=base, device=device)
        shape = [1, 1, 1, own.shape[1]]
        shape[axis] = size
        angles.append(own.view(shape).expand(*grid, -1))
    angles_SR = torch.cat(angles, -1).flatten(0, 2)
    return angles_SR.cos().to(dtype), angles_SR.sin().to(dtype)
