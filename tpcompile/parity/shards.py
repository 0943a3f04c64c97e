"""Shards of one tensor on all ranks of a group -> what is wrong with their shapes, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpcompile.parity.weights import Weight


def misfit(shards: Mapping[int, Weight]) -> str:
    """One line when shapes neither are equal nor tile the declared full shape; "" when they fit.

    Dims whose full size nobody knows (another mesh axis shards them too) are not checked.
    """
    first = next(iter(shards.values()))
    shapes = [weight.shape for weight in shards.values()]
    if len({weight.full_shape for weight in shards.values()}) > 1:
        return "the ranks declare different full shapes"
    if len({len(shape) for shape in shapes}) > 1:
        return "the shards have different numbers of dims"
    if first.full_shape is None:
        return "" if len(set(shapes)) == 1 else "shard shapes differ, and nobody declared the full shape they tile"
    if len(first.full_shape) != len(shapes[0]):
        return f"the shards do not have the dims of the declared full shape {_text(first.full_shape)}"
    dims = range(len(first.full_shape)) if first.dim is None else [first.dim]
    if any(_tiles(shapes, first.full_shape, dim) for dim in dims):
        return ""
    return f"the shards do not tile the full shape {_text(first.full_shape)}"


def shard_text(weight: Weight) -> str:
    """`float32[5, 4] of [10, 4] on dim 0 (DTensor)`."""
    of = "" if weight.full_shape is None else f" of {_text(weight.full_shape)}"
    dim = "" if weight.dim is None else f" on dim {weight.dim}"
    return f"{weight.dtype}{list(weight.shape)}{of}{dim} ({weight.said_by})"


def _tiles(shapes: Sequence[Sequence[int]], full: Sequence[int | None], dim: int) -> bool:
    """True when the shards add up to the full size along `dim` and are equal, and whole, in the others."""
    sizes, wanted = list(zip(*shapes, strict=True)), list(full)
    along, total = sizes.pop(dim), wanted.pop(dim)
    if total not in (None, sum(along)):
        return False
    return all(set(column) == {size or column[0]} for column, size in zip(sizes, wanted, strict=True))


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
