"""Layout of a tensor over the ranks of a group -> its full shape, one rank's slice, and the whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Rows (or columns) that are sharded together: whole units in order, the same number on every rank."""

    size: int
    """Rows of the full tensor."""
    unit: int = 1
    """Rows that stay together: a head, or the query heads of one kv head."""
    replicas: int = 1
    """Neighbouring ranks that hold the same share: more ranks than kv heads."""
    padded: bool = False
    """Rows of zeros fill the last shares, so that shapes and with them graphs are equal on all ranks."""
    align: int = 1
    """Shares that need padding are filled up to a multiple of this many rows."""

    def share(self, tp: int, name: str = "size") -> int:
        """Rows of every rank; raises ConfigError when they do not divide evenly and the part is not padded."""
        owners, units = tp // self.replicas, self.size // self.unit
        if units % owners == 0:
            return self.size // owners
        if not self.padded:
            good = [n for n in range(1, min(units, 64) + 1) if units % n == 0]
            raise ConfigError(f"{name}={units} is not divisible by tp={owners}; choose tp from {good}, or pad it")
        rows = -(-units // owners) * self.unit
        return -(-rows // self.align) * self.align

    def rows(self, *, rank: int, tp: int) -> tuple[int, int]:
        """First row of the rank and how many of its rows are real."""
        share = self.share(tp)
        start = min(rank // self.replicas * share, self.size)
        return start, min(share, self.size - start)


@dataclass(frozen=True)
class ShardSpec:
    """Layout of one parameter, as its module declares it in `shard_specs()`; nothing is inferred from names."""

    dim: int | None = None
    """Sharded dim; None for a replicated parameter."""
    parts: Sequence[Part | int] = ()
    """What is packed along `dim`, each part sharded on its own; an int is a `Part` of that many single rows."""
    packed: tuple[Part, ...] = field(init=False)
    """`parts`, all of them as `Part`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", tuple(Part(p) if isinstance(p, int) else p for p in self.parts))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Full rows of each part."""
        return tuple(part.size for part in self.packed)

    def full_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the unsharded parameter."""
        shape = list(local_shape)
        if self.dim is not None:
            shape[self.dim] = sum(self.sizes)
        return tuple(shape)

    def take(self, full: Tensor, *, rank: int, size: int) -> Tensor:
        """Slice of rank `rank` of `size`: its share of every part, never a chunk of the packed tensor."""
        if self.dim is None or size == 1:
            return full
        pieces = []
        for part, rows in zip(self.packed, full.split(self.sizes, self.dim), strict=True):
            start, count = part.rows(rank=rank, tp=size)
            own, missing = rows.narrow(self.dim, start, count), part.share(size) - count
            pieces.append(F.pad(own, [0, 0] * (own.dim() - 1 - self.dim) + [0, missing]) if missing else own)
        return torch.cat(pieces, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The unsharded parameter of all ranks' slices, in rank order, bit for bit; padding is dropped."""
        if self.dim is None or len(shards) == 1:
            return shards[0]
        tp = len(shards)
        shares = [part.share(tp) for part in self.packed]
        local = [shard.split(shares, self.dim) for shard in shards]
        pieces = []
        for index, part in enumerate(self.packed):
            for rank in range(0, tp, part.replicas):
                rows = local[rank][index]
                _, count = part.rows(rank=rank, tp=tp)
                pieces.append(rows.narrow(self.dim, 0, count))
        return torch.cat(pieces, self.dim)


Layout: TypeAlias = ShardSpec | int
"""A layout, or the dim that is sharded in equal parts."""
