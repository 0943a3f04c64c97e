"""Memory of a case: NaN around and between what kernels read, and around what they allocate.

A read beyond a mask gives NaN, and a write beyond an allocation is found afterwards.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tpcompile.errors import DivergenceError

_FENCE = 64
"""Elements before, between and after."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> how its bits are looked at."""
_FAR = 2**30 + 64
"""Elements between two rows, so that the third is further than 2^31 from the first."""
_MAP_NORESERVE = 0x4000
"""Linux: no memory is set aside for pages that are not touched."""


def fenced(x: Tensor) -> Tensor:
    """The same values, dense, with NaN before and after; autograd sees through."""
    fence = x.new_full((_FENCE,), float("nan"))
    return torch.cat((fence, x.flatten(), fence))[_FENCE : _FENCE + x.numel()].view(x.shape)


def spaced(x: Tensor) -> Tensor:
    """The same values with gaps of NaN between rows; autograd sees through."""
    gap = x.new_full((*x.shape[:-1], _FENCE), float("nan"))
    return torch.cat((x, gap), -1)[..., : x.shape[-1]]


def far_apart(x_BSD: Tensor) -> Tensor:
    """The same values with rows 2^30 elements apart, in memory of which only the rows are touched."""
    batch, num_tokens, _ = x_BSD.shape
    size = batch * num_tokens * _FAR
    if x_BSD.is_cuda:
        memory = torch.empty(size, dtype=x_BSD.dtype, device=x_BSD.device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, size * x_BSD.element_size(), flags), dtype=x_BSD.dtype)
    return memory.as_strided(x_BSD.shape, (num_tokens * _FAR, _FAR, 1)).copy_(x_BSD.detach())


@contextmanager
def fenced_allocations() -> Iterator[None]:
    """Inside, `empty` in all its forms gives memory of NaN between fences; DivergenceError if one was written to."""
    fences: list[Tensor] = []

    def between_fences(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            wanted = make(*args, **kwargs)
            if not wanted.is_floating_point():
                return wanted
            memory = _unwritten(wanted, wanted.numel() + 2 * _FENCE)
            fences.extend((memory[:_FENCE], memory[-_FENCE:]))
            return memory[_FENCE:-_FENCE].view(wanted.shape)

        return allocate

    with (
        mock.patch.object(torch.Tensor, "new_empty", between_fences(torch.Tensor.new_empty)),
        mock.patch.object(torch, "empty", between_fences(torch.empty)),
        mock.patch.object(torch, "empty_like", between_fences(torch.empty_like)),
    ):
        yield
    if not all(torch.equal(_bits(fence), _bits(_unwritten(fence, _FENCE))) for fence in fences):
        raise DivergenceError("a kernel wrote outside of the memory that its launcher allocated")


def _unwritten(like: Tensor, size: int) -> Tensor:
    """NaN that no arithmetic gives, so that a NaN which is written over it is seen."""
    memory = like.new_full((size,), float("nan"))
    _bits(memory).bitwise_or_(1)
    return memory


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])
