"""Keys and values of new tokens -> those of all tokens so far, in buffers whose shape never changes."""

# B batch, S new tokens, T places in the cache, g key and value heads on this rank, E head size
from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.errors import ConfigError


class KVCache(nn.Module):
    """Static buffers [B, T, g, E] of one attention layer for decoding; no gradient, not in the state dict.

    Which places are written is tensor data and the buffers always have T places, so a compiled step is one graph that
    serves every step. `num_heads` counts this rank's key and value heads: the cache itself never communicates.
    """

    k_BTgE: Tensor
    v_BTgE: Tensor

    def __init__(
        self,
        batch: int,
        max_len: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shape = (batch, max_len, num_heads, head_dim)
        if min(shape) < 1:
            raise ConfigError(f"cache of shape {shape} (batch, max_len, num_heads, head_dim) is empty")
        self.max_len = max_len
        for name in ("k_BTgE", "v_BTgE"):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def update(self, k_BSgE: Tensor, v_BSgE: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor]:
        """Write S tokens at `positions_S` (int64, each once) in place and return the whole buffers.

        Raises ConfigError when shapes, dtypes or the number of positions do not fit the buffers, and when a gradient
        is asked for. A position beyond the cache is the caller's to prevent with `check_room`: positions are data on
        the device, and reading them to raise would stop it. torch then raises on CPU and asserts on the device.
        """
        self._check_fits(k_BSgE, positions_S)
        self._check_fits(v_BSgE, positions_S)
        self.k_BTgE.index_copy_(1, positions_S, k_BSgE)
        self.v_BTgE.index_copy_(1, positions_S, v_BSgE)
        return self.k_BTgE, self.v_BTgE

    def mask(self, positions_S: Tensor) -> Tensor:
        """Bool [S, T], True where a query may look: at its own position and before; hides unwritten places as well."""
        places_T = torch.arange(self.max_len, device=positions_S.device)
        return places_T <= positions_S.unsqueeze(1)

    def check_room(self, length: int) -> None:
        """Raise ConfigError unless `length` tokens fit; the decode loop knows this number without asking the device."""
        if length > self.max_len:
            raise ConfigError(f"{length} tokens do not fit in a cache of {self.max_len}; raise its max_len to {length}")

    def reset(self) -> None:
        """Clear all cached keys and values, in place."""
        self.k_BTgE.zero_()
        self.v_BTgE.zero_()

    def _check_fits(self, x_BSgE: Tensor, positions_S: Tensor) -> None:
        batch, _, heads, head_dim = self.k_BTgE.shape
        expected = (batch, positions_S.numel(), heads, head_dim)
        if positions_S.dim() != 1 or positions_S.dtype != torch.int64:
            raise ConfigError(f"positions are {positions_S.dtype} {tuple(positions_S.shape)}; pass int64 [S]")
        if tuple(x_BSgE.shape) != expected or x_BSgE.dtype != self.k_BTgE.dtype:
            raise ConfigError(
                f"keys or values are {x_BSgE.dtype} {tuple(x_BSgE.shape)}, the cache expects {self.k_BTgE.dtype} "
                f"{expected} for these positions"
            )
        self.check_room(expected[1])
        if torch.is_grad_enabled() and x_BSgE.requires_grad:
            raise ConfigError("the cache keeps no gradient; decode under torch.no_grad() or torch.inference_mode()")
