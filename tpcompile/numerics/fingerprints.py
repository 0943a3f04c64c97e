"""Tensor -> a short vector that stands for it: sums under pseudo-random signs, of all of it and of each rank's part.

It is linear, so the sum of those of all ranks is that of the sum over the ranks. The sign of an element is the product
of one sign for its place along each dim: two passes over a tensor then give the sums of its parts along every dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Fingerprint = tuple[float, ...]
"""Sums of a tensor under signs: they are about as large as its norm, also those of a difference."""
Shape = tuple[int, ...]

NUM_SUMS = 8
"""Numbers of a fingerprint."""
_BLOCK = 2**NUM_SUMS
"""Places next to each other that all have different signs."""
_PIECES = (1, 2, 3)
"""Tensors that may be packed in one: gate and up, queries with keys and values."""
_OUT, _STANDS_FOR_OUT = 1e30, 8.0
"""What masks a place out is the lowest number of its dtype, or infinity: in float64 it is another one, and no sum is
known of either. What stands for it is no larger than scores are: beside 1e4 they were lost in the tolerance, and wrong
scores were right once they were masked."""
_SEED = 1
_MIXER = 7046029254386353131
"""A constant of the SplitMix64 generator."""


@dataclass(frozen=True)
class Part:
    """A rank's equal part of a value along one dim, or of each of the equal pieces that are packed along it."""

    rank: int
    shape: Shape
    tensor: Fingerprint


@dataclass(frozen=True)
class Summary:
    """What is kept of a tensor."""

    whole: Fingerprint
    parts: tuple[Part, ...] = ()
    """A rank's equal parts of it, along each dim."""
    moments: Fingerprint = ()
    """Norm, sum and maximum, which do not depend on the order; the value alone of a tensor with one element."""


def summary(tensor: Tensor, *, size: int = 1) -> Summary:
    """Its fingerprint, equal on all devices up to rounding, and those of the parts of `size` ranks."""
    sums = _Sums(tensor)
    parts = tuple(sums.parts(size)) if size > 1 else ()
    return Summary(sums.whole, parts, sums.moments)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The fingerprint alone."""
    return _Sums(tensor).whole


class _Sums:
    """A tensor as rows of its last dim, and the sums of each of these rows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape) or (1,)
        rows_NL = tensor.detach().reshape(math.prod(self.shape[:-1]), self.shape[-1]).double()
        is_out = rows_NL.abs() >= _OUT
        self.rows_NL = torch.where(is_out, rows_NL.sign() * _STANDS_FOR_OUT, rows_NL) if is_out.any() else rows_NL
        self.device = tensor.device
        sums = self.rows_NL @ _signs(self.shape[-1], len(self.shape) - 1, self.device)
        self.by_row = sums.view(*self.shape[:-1], NUM_SUMS)

    @property
    def whole(self) -> Fingerprint:
        return tuple(self._over_all_but(None).tolist())

    @property
    def moments(self) -> Fingerprint:
        numbers = self.rows_NL.flatten()
        if len(numbers) == 1:
            return (float(numbers),)
        if not len(numbers):
            return (0.0, 0.0, 0.0)
        return tuple(torch.stack([(numbers @ numbers).sqrt(), numbers.sum(), numbers.amax()]).tolist())

    def parts(self, size: int) -> Iterator[Part]:
        for dim, length in enumerate(self.shape):
            may_be_packed = dim in (0, len(self.shape) - 1)  # rows of a weight, features of an activation
            counts = [count for count in (_PIECES if may_be_packed else (1,)) if length % (size * count) == 0]
            if not counts or not length:
                continue
            if dim == len(self.shape) - 1:  # over all others, without the signs of the last
                along = (_signs_of_rows(self.shape[:-1], self.device).T @ self.rows_NL).T.contiguous()
            else:
                along = self._over_all_but(dim)
            for pieces in counts:
                yield from self._parts_along(along, dim, pieces, size)

    def _parts_along(self, along: Tensor, dim: int, pieces: int, size: int) -> Iterator[Part]:
        """The parts of all ranks, each made of its part of every piece; `along` [length of the dim, sums]."""
        part = self.shape[dim] // size
        signs = _signs(part, dim, self.device).view(pieces, 1, -1, NUM_SUMS)
        shape = (*self.shape[:dim], part, *self.shape[dim + 1 :])
        of_ranks = (along.view(pieces, size, -1, NUM_SUMS) * signs).sum((0, 2))
        for rank, numbers in enumerate(of_ranks.tolist()):
            yield Part(rank, shape, tuple(numbers))

    def _over_all_but(self, kept: int | None) -> Tensor:
        """The sums over all dims but this one, which is none of the last: [its length, sums], or [sums]."""
        sums = self.by_row
        for dim in reversed(range(len(self.shape) - 1)):
            if dim != kept:
                signs = _signs(self.shape[dim], dim, self.device)
                beside = sums.dim() - dim - 2
                sums = (sums * signs.view(-1, *[1] * beside, NUM_SUMS)).sum(dim)
        return sums


@functools.lru_cache(maxsize=64)
def _signs_of_rows(shape: Sequence[int], device: torch.device) -> Tensor:
    """[all places of the shape, sums]: the product of the signs along each dim."""
    signs = torch.ones(1, NUM_SUMS, dtype=torch.float64, device=device)
    for dim, length in enumerate(shape):
        signs = (signs.unsqueeze(1) * _signs(length, dim, device)).flatten(0, 1)
    return signs


def _signs(length: int, dim: int, device: torch.device) -> Tensor:
    """[length, sums] for the places along a dim."""
    rounded = 2 ** max(8, math.ceil(math.log2(max(1, length))))
    return _table(rounded, dim, device)[:length]


@functools.cache
def _table(length: int, dim: int, device: torch.device) -> Tensor:
    place = torch.arange(length)
    order = torch.randperm(_BLOCK, generator=torch.Generator().manual_seed(_SEED + dim))
    block = (place // _BLOCK * 2 + 1) * (_MIXER ^ dim * 2 + 1)
    code = order[place % _BLOCK] ^ ((block ^ (block >> 29)) >> 24)
    bits = (code.unsqueeze(1) >> torch.arange(NUM_SUMS)) & 1
    return (1.0 - 2.0 * bits.double()).to(device)
