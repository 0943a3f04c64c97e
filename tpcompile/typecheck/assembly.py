"""Shapes of a parameter on the ranks and on one device -> the ways in which the ranks may hold its rows.

A layout that is not declared is one of few: a part after the other, packed matrices that are cut one by one (gate | up,
q | k | v, with fewer key heads), key heads that several ranks hold, a last part that is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tpcompile.layout import ShardSpec

Shape = tuple[int, ...]
_PADDING = -1
_PACKED = ((1, 1), (1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1))
"""Relative widths of matrices in one parameter."""


@dataclass(frozen=True)
class Assembly:
    """Which rows of a full parameter each rank holds."""

    dim: int = 0
    rows: tuple[Tensor, ...] = ()
    """Of each rank, [its rows], -1 for padding; none where every rank holds all."""

    @property
    def is_whole(self) -> bool:
        """Every rank holds all of it."""
        return not self.rows

    def part(self, full: Tensor, rank: int) -> Tensor:
        """What the rank holds of a full tensor; zeros for padding."""
        if self.is_whole:
            return full
        index = self.rows[rank]
        shape = [1] * full.dim()
        shape[self.dim] = len(index)
        return full.index_select(self.dim, index.clamp_min(0)).masked_fill((index == _PADDING).view(shape), 0)

    def full(self, parts: Sequence[Tensor], shape: Shape) -> Tensor:
        """The full tensor of this shape that the parts of the ranks make."""
        if self.is_whole:
            return parts[0]
        whole = parts[0].new_zeros(shape).movedim(self.dim, 0)
        for index, part in zip(self.rows, parts, strict=True):
            kept = index != _PADDING
            whole[index[kept]] = part.movedim(self.dim, 0)[kept]
        return whole.movedim(0, self.dim)

    def summed(self, parts: Sequence[Tensor], shape: Shape) -> Tensor:
        """The sum of what the ranks hold of each row of a full tensor of this shape."""
        total = parts[0].new_zeros(shape).movedim(self.dim, 0)
        for index, part in zip(self.rows, parts, strict=True):
            kept = index != _PADDING
            total.index_add_(0, index[kept], part.movedim(self.dim, 0)[kept])
        return total.movedim(0, self.dim)


WHOLE = Assembly()


def declared(spec: ShardSpec, full: Shape, size: int) -> Assembly:
    """The layout that a module declares."""
    if spec.dim is None:
        return WHOLE
    dim = spec.dim % len(full)
    shape = [1] * len(full)
    shape[dim] = full[dim]
    numbers = torch.arange(1, full[dim] + 1, dtype=torch.float64).view(shape)  # 0 is padding
    taken = [spec.take(numbers, rank=rank, size=size) for rank in range(size)]
    return Assembly(dim, tuple(part.flatten().long() - 1 for part in taken))


def possible(full: Shape, parts: Sequence[Shape]) -> list[Assembly]:
    """The layouts that the shapes allow, the most likely first; none where they are no parts of the full one."""
    if all(part == full for part in parts):
        return [WHOLE]
    if any(len(part) != len(full) for part in parts):
        return []
    dims = {dim for part in parts for dim, size in enumerate(part) if size != full[dim]}
    if len(dims) != 1:
        return []
    (dim,) = dims
    return [Assembly(dim, rows) for rows in _possible_rows(full[dim], [part[dim] for part in parts])]


def _possible_rows(length: int, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    size, num_ranks, total = sizes[0], len(sizes), sum(sizes)
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    rows = [torch.arange(start, end) for start, end in pairwise(ends)]
    in_order = [tuple(index.masked_fill(index >= length, _PADDING) for index in rows)]
    are_equal = len(set(sizes)) == 1
    if total == length and not are_equal:
        return in_order
    if total == length:
        in_turn = tuple(torch.arange(rank, length, num_ranks) for rank in range(num_ranks))  # a row to each rank
        return [*in_order, *_packed(size, num_ranks), *([in_turn] if size > 1 else [])]
    if total < length:
        return []
    shared: list[tuple[Tensor, ...]] = []
    if are_equal:
        shared = _shared(length, size, num_ranks) or _partly_shared(length, size, num_ranks)
    is_padded = total - length <= max(sizes) * num_ranks // 2
    return shared or (in_order if is_padded else [])


def _packed(size: int, num_ranks: int) -> list[tuple[Tensor, ...]]:
    """Several matrices below each other, each cut in equal parts."""
    found = []
    for relative_widths in _PACKED:
        unit, left = divmod(size, sum(relative_widths))
        if unit and not left:
            widths = [width * unit for width in relative_widths]
            starts = [0, *accumulate(width * num_ranks for width in widths)]
            of_each = list(zip(starts, widths, strict=False))
            found.append(
                tuple(
                    torch.cat([torch.arange(width) + start + rank * width for start, width in of_each])
                    for rank in range(num_ranks)
                )
            )
    return found


def _shared(length: int, size: int, num_ranks: int) -> list[tuple[Tensor, ...]]:
    """Equal parts that several neighbours hold alike, as key heads of which there are fewer than ranks."""
    num_parts, left = divmod(length, size)
    if left or num_ranks % num_parts:
        return []
    num_holders = num_ranks // num_parts
    return [tuple(torch.arange(size) + rank // num_holders * size for rank in range(num_ranks))]


def _partly_shared(length: int, size: int, num_ranks: int) -> list[tuple[Tensor, ...]]:
    """q | k | v in one parameter, of which several neighbours hold the same k and v."""
    for num_holders in (each for each in range(2, num_ranks + 1) if num_ranks % each == 0):
        keys, left = divmod(size * num_ranks - length, 2 * (num_holders - 1))
        queries = length - 2 * keys
        is_cut = queries > 0 and queries % num_ranks == 0 and keys % (num_ranks // num_holders) == 0
        if is_cut and not left and queries % keys == 0:
            return [
                tuple(_of_queries_and_keys(queries, keys, rank, num_ranks, num_holders) for rank in range(num_ranks))
            ]
    return []


def _of_queries_and_keys(queries: int, keys: int, rank: int, num_ranks: int, num_holders: int) -> Tensor:
    own = torch.arange(queries // num_ranks) + rank * (queries // num_ranks)
    part = keys // (num_ranks // num_holders)
    shared = torch.arange(part) + queries + rank // num_holders * part
    return torch.cat([own, shared, shared + keys])
