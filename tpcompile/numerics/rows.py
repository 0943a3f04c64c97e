"""A rank's parameter and the full one -> which rows of the full one it has: whatever the layout, as the numbers show.

So shards of any kind are compared with the reference without a declaration: equal parts, q | k | v and gate | up that
are packed in one matrix, interleaved heads, key heads that several ranks hold, rows in a different order, padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_PADDING = -1
_MULTIPLIER = 6364136223846793005
"""The multiplier of Knuth's MMIX generator: multiples of it are the weights of a row's hash."""


@dataclass(frozen=True)
class Rows:
    """Rows along one dim of a full parameter; no index takes all of it."""

    dim: int = 0
    index: Tensor | None = None
    """[rows of the rank]; -1 for one that is padding."""
    length: int = 0
    """Rows of the full parameter."""

    def has(self, index: Tensor) -> bool:
        """True for exactly these rows, in this order."""
        return self.index is not None and torch.equal(self.index.cpu(), index)

    def of(self, full: Tensor) -> Tensor:
        """The same rows of a tensor that has the parameter's shape; zeros for padding."""
        if self.index is None:
            return full
        index = self.index.to(full.device)
        shape = [1] * full.dim()
        shape[self.dim] = len(index)
        rows = full.index_select(self.dim, index.clamp_min(0))
        return rows.masked_fill((index == _PADDING).view(shape), 0)


def all_rows(local: Mapping[str, Tensor], full: Mapping[str, Tensor], *, rank: int, size: int) -> dict[str, Rows]:
    """Name -> the rows that the rank has of it, among `size` ranks; without those that are no rows of the full one.

    A bias of zeros does not show which it has: it has those of the weight beside it, or else an equal part.
    """
    found: dict[str, Rows] = {}
    both = [name for name in local if name in full]
    for name in sorted(both, key=lambda name: (name.endswith("bias"), both.index(name))):
        weight = found.get(f"{name.removesuffix('bias')}weight", Rows())
        beside = weight.index if weight.dim == 0 else None
        rows = rows_of(local[name], full[name].to(local[name].dtype), beside=beside, rank=rank, size=size)
        if rows is not None:
            found[name] = rows
    return found


def of_unknown_rows(local: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> dict[str, Rows]:
    """Name -> the dim that is cut, of parameters that are shorter in one dim: a matrix that was cut as flat memory."""
    found: dict[str, Rows] = {}
    for name in filter(full.__contains__, local):
        lengths = zip(local[name].shape, full[name].shape, strict=False)
        dims = [dim for dim, (own, whole) in enumerate(lengths) if own != whole]
        if local[name].dim() == full[name].dim() and len(dims) == 1:
            part = local[name].shape[dims[0]]
            found[name] = Rows(dims[0], torch.full((part,), _PADDING), full[name].shape[dims[0]])
    return found


@dataclass(frozen=True)
class Cut:
    """Rows that a rank has of whatever is as long as its full parameter: gradients, features of an activation."""

    rank: int
    length: int
    index: Tensor

    @property
    def has_padding(self) -> bool:
        """True where rows of the rank are none of the full parameter."""
        return bool((self.index == _PADDING).any())

    def parts_of(self, tensor: Tensor) -> list[Tensor]:
        """Its rows along the first dim, and its features along the last."""
        dims = {0, tensor.dim() - 1} if tensor.dim() else set()
        return [Rows(dim, self.index).of(tensor) for dim in sorted(dims) if tensor.shape[dim] == self.length]


def unequal_cuts(layouts: Iterable[Rows], *, rank: int, size: int) -> list[Cut]:
    """The different cuts among these layouts, without those in equal parts: of padding, of heads held by several."""
    found: dict[tuple[int, ...], Cut] = {}
    for rows in layouts:
        if rows.index is None:
            continue
        equal = _equal_part(rows.length, rank=rank, size=size)
        if equal is not None and torch.equal(equal, rows.index.cpu()):
            continue
        found[(rows.length, *rows.index.tolist())] = Cut(rank, rows.length, rows.index)
    return list(found.values())


def rows_of(local: Tensor, full: Tensor, *, beside: Tensor | None, rank: int, size: int) -> Rows | None:
    """The rows of `full` of which `local` consists; None where it does not.

    `beside` are rows to prefer where equal rows leave it open.
    """
    if local.shape == full.shape and torch.equal(local, full):
        return Rows()
    for dim in range(local.dim() if local.dim() == full.dim() else 0):
        others_differ = local.shape[:dim] + local.shape[dim + 1 :] != full.shape[:dim] + full.shape[dim + 1 :]
        if others_differ:
            continue
        mine, whole = _hashed(local, dim), _hashed(full, dim)
        guesses = [beside, _equal_part(len(whole), rank=rank, size=size)]
        if len(whole.unique()) == len(whole):
            places = {int(row): place for place, row in enumerate(whole.tolist())}
            # -1 for a row that is nowhere: `_are` then wants zeros.
            guesses = [torch.tensor([places.get(row, _PADDING) for row in mine.tolist()])]
        for index in guesses:
            if index is not None and _are(index, mine, whole):
                return Rows(dim, index, len(whole))
    return Rows() if local.shape == full.shape else None  # a weight that is wrong before the step


def _hashed(tensor: Tensor, dim: int) -> Tensor:
    """An exact hash of each row along the dim, by its bits: a sum that wraps does not depend on its order."""
    rows = (tensor.detach().movedim(dim, 0).reshape(tensor.shape[dim], -1).double() + 0.0).view(
        torch.int64
    )  # no negative zero
    places = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    weights = (places * _MULTIPLIER) ^ (places * _MULTIPLIER >> 29)
    return ((rows ^ (rows >> 31)) * (2 * weights + 1)).sum(1)


def _equal_part(length: int, *, rank: int, size: int) -> Tensor | None:
    if length % size:
        return None
    part = length // size
    return torch.arange(rank * part, (rank + 1) * part)


def _are(index: Tensor, mine: Tensor, whole: Tensor) -> bool:
    """True where the rank's rows are these, and zeros where it has none."""
    if len(index) != len(mine):
        return False
    index = index.to(whole.device)
    wanted = whole[index.clamp_min(0)].masked_fill(index == _PADDING, 0)
    return bool(torch.equal(wanted, mine))
