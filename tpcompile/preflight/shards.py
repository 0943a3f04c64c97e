"""Shards of one tensor on all ranks of a group -> one line on what is wrong with their shapes, or ""."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.preflight.weights import Weight


def misfit(shards: ByRank[Weight]) -> str:
    """What is wrong when the shapes are neither equal nor tile the declared full shape; "" when they fit.

    A dim whose full size is not known, because a different mesh axis shards it too, is not checked.
    """
    shapes = shards.map(lambda weight: weight.shape)
    full, dim = shards.first.full_shape, shards.first.dim
    if shards.differ(lambda weight: weight.full_shape):
        return "the ranks declare different full shapes"
    if shapes.differ(len):
        return "the shards have different numbers of dims"
    if full is None:
        return "shard shapes differ, and the full shape is not declared" if shapes.differ() else ""
    if len(full) != len(shapes.first):
        return f"the shards and the declared full shape have different numbers of dims: {_text(full)}"
    possible_dims = range(len(full)) if dim is None else [dim]
    for possible_dim in possible_dims:
        if _tiles(list(shapes.values()), full, possible_dim):
            return ""
    return f"the shards do not tile the full shape {_text(full)}"


def shard_text(weight: Weight) -> str:
    """`float32[5, 4] of [10, 4] on dim 0 (DTensor)`."""
    of = "" if weight.full_shape is None else f" of {_text(weight.full_shape)}"
    dim = "" if weight.dim is None else f" on dim {weight.dim}"
    return f"{weight.dtype}{list(weight.shape)}{of}{dim} ({weight.declared_by})"


def _tiles(shapes: Sequence[Sequence[int]], full: Sequence[int | None], dim: int) -> bool:
    """True when the shards add up to the full size of `dim` and have the full size of every other dim."""
    sizes = list(zip(*shapes, strict=True))
    wanted = list(full)
    along = sizes.pop(dim)
    total = wanted.pop(dim)
    if total not in (None, sum(along)):
        return False
    return all(set(column) == {size or column[0]} for column, size in zip(sizes, wanted, strict=True))


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
