"""Activations, seed -> dropped activations, with one mask however the activations are sharded.

The mask is a hash of (seed, site, place in the full tensor) and no state of a generator, so that replicated
activations get one mask on all ranks, sharded ones get their part of the single-device mask, eager and compiled code
agree bit for bit at every tp size, and a recomputed layer (activation checkpointing) drops what it dropped before.
Compiled, it is pointwise and fuses; eager code allocates several int64 tensors of the activations' shape.

Which to use: `Dropout` for everything a model drops itself. `seed_ranks` for random ops of torch that take no
mask, such as dropout inside scaled_dot_product_attention, on sharded work only: without it all ranks drop the
same places of different heads, with it they would drop different places of replicated activations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError

_LOW_32 = 0xFFFFFFFF
# Multipliers and shifts of lowbias32, found by search for least bias, public domain (Unlicense): Chris Wellons,
# https://nullprogram.com/blog/2018/07/31/. The second multiplier is written minus 2**32, the same modulo 2**32: the
# product of it and 32 bits fits in an int64, whose overflow is undefined in the C++ that Inductor generates.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
# Fractional bits of the golden ratio and of sqrt(3): lowbias32 maps 0 to 0, so seed 0 must not enter as 0.
_GOLDEN, _SQRT_3 = 0x9E3779B9, 0xBB67AE85


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p); identity in eval mode and for p = 0.

    `site` numbers the dropouts of a model: two of them with one number drop the same places. `sharded_dim` is the dim
    that the ranks hold equal contiguous shares of, None for replicated activations; `full_size` is its size without the
    padding that fills up the last shares, None where there is none. Raises ConfigError for `p` outside [0, 1) and a
    site outside [0, 2**32).
    """

    def __init__(
        self, p: float, *, site: int, comm: TpComm, sharded_dim: int | None = None, full_size: int | None = None
    ) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"p={p} is outside [0, 1); 1 would drop everything")
        if not 0 <= site <= _LOW_32:
            raise ConfigError(f"site={site} is outside [0, 2**32); number the dropouts of a model from 0")
        self.p, self.site, self.comm = p, site, comm
        self.sharded_dim, self.full_size = sharded_dim, full_size

    def forward(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """x of any shape and seed [1] int64, equal on all ranks and new in every step -> same shape.

        Raises ConfigError for no seed or one of the wrong shape or dtype, and a `sharded_dim` that x lacks.
        """
        if not self.training or self.p == 0:
            return x
        if seed is None:
            raise ConfigError(f"dropout with p={self.p} needs a seed; pass an int64 tensor of shape (1,) to the model")
        if seed.shape != (1,) or seed.dtype != torch.int64:
            raise ConfigError(f"seed is {seed.dtype} {tuple(seed.shape)}; pass an int64 tensor of shape (1,)")
        index = global_index(
            x.shape, sharded_dim=self.sharded_dim, comm=self.comm, device=x.device, full_size=self.full_size
        )
        keep = keep_mask(index, seed, site=self.site, p=self.p)
        return torch.where(keep, x * (1 / (1 - self.p)), 0.0)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"p={self.p}, site={self.site}, sharded_dim={self.sharded_dim}"


def keep_mask(index: Tensor, seed: Tensor, *, site: int, p: float) -> Tensor:
    """Bool, True with probability 1 - p to the nearest 2**-32: a pure function of all four, pointwise in `index`.

    Two rounds under two keys: with one round, the masks of two seeds would be one mask with its places permuted.
    """
    low, high = seed & _LOW_32, (seed >> 32) & _LOW_32
    first_key = _mix(_mix(_mix(low ^ _GOLDEN) ^ high) ^ site)
    second_key = _mix(_mix(_mix(high ^ _SQRT_3) ^ low) ^ (site ^ _GOLDEN))
    bits = _mix(_mix((index & _LOW_32) ^ first_key) ^ second_key ^ (index >> 32))
    return bits >= round(p * 2**32)


def global_index(
    shape: Sequence[int],
    *,
    sharded_dim: int | None,
    comm: TpComm,
    device: torch.device,
    full_size: int | None = None,
) -> Tensor:
    """Place of each local element in the row-major full tensor, int64 of `shape`; the rank enters as data.

    `full_size` is the size of the sharded dim in the full tensor, None for size times ranks; elements of its padding
    get places that are not theirs. Raises ConfigError for a `sharded_dim` out of range.
    """
    if sharded_dim is None or comm.size == 1:
        return torch.arange(math.prod(shape), device=device).view(shape)
    if not -len(shape) <= sharded_dim < len(shape):
        raise ConfigError(f"sharded_dim={sharded_dim} is out of range for a tensor with {len(shape)} dims")
    dim = sharded_dim % len(shape)
    size, inner = shape[dim], math.prod(shape[dim + 1 :])
    outer = torch.arange(math.prod(shape[:dim]), device=device) * ((full_size or size * comm.size) * inner)
    own = (torch.arange(size, device=device) + comm.rank_index(device) * size) * inner
    index = outer[:, None, None] + own[:, None] + torch.arange(inner, device=device)
    return index.view(shape)


def seed_ranks(seed: int, comm: TpComm) -> int:
    """Seed torch's default generators, of all devices, differently on every rank and reproducibly; return that seed.

    For torch's own random ops on sharded activations; see the top of this file. Data-parallel replicas pass different
    seeds. Call it outside compiled code.
    """
    digest = hashlib.sha256(f"{seed}/{comm.rank}".encode()).digest()
    own = int.from_bytes(digest[:8], "big") >> 1
    torch.manual_seed(own)
    return own


def _mix(x: Tensor) -> Tensor:
    """lowbias32: a bijection of 32-bit numbers, here held in int64."""
    x = ((x ^ (x >> 16)) * _FIRST) & _LOW_32
    x = ((x ^ (x >> 15)) * _SECOND) & _LOW_32
    return x ^ (x >> 16)
