"""Tensor + ProcessGroup -> tensor after one collective; no gradient, no validation, traced or eager.

Sizes are per rank of the group along `dim`; None means equal. The ops concatenate on dim 0, so any other dim costs one
copy, and uneven sizes are sent padded to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpcompile.torch_api import c10d

Sizes = tuple[int, ...] | None


def issue_all_reduce(x: Tensor, op: str, group: Any) -> Tensor:
    """Reduce over the group; `avg` is a sum and a division, since gloo has no average."""
    if op == "avg":
        return issue_all_reduce(x, "sum", group) / group.size()
    if x.is_complex():
        return torch.view_as_complex(issue_all_reduce(_as_real(x), op, group))
    raw, work = c10d.begin_all_reduce(x, op, group)
    return c10d.end(raw, work)


def issue_all_gather(x: Tensor, dim: int, group: Any, sizes: Sizes = None) -> Tensor:
    """Concatenate every rank's `x` along `dim`."""
    wire = to_wire(x if sizes is None else padded(x, dim, max(sizes)))
    raw = c10d.end(*c10d.begin_all_gather(wire, group))
    return joined(from_wire(raw, x), dim, group.size(), sizes)


def issue_reduce_scatter(x: Tensor, dim: int, group: Any, sizes: Sizes) -> Tensor:
    """Sum over the group and keep this rank's part of `dim`."""
    wire = to_wire(stacked(x, dim, group.size(), sizes))
    raw = from_wire(c10d.end(*c10d.begin_reduce_scatter(wire, group)), x)
    return raw if sizes is None else raw.narrow(dim, 0, sizes[group.rank()])  # rank-dependent: uneven shards are


def issue_all_to_all(x: Tensor, dim: int, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
    """Part r of `dim` goes to rank r; the parts received are concatenated along `dim`."""
    wire = to_wire(x.movedim(dim, 0) if dim else x)
    raw = c10d.end(*c10d.begin_all_to_all(wire, list(receive), list(send), group))
    return from_wire(raw, x).movedim(0, dim) if dim else from_wire(raw, x)


def issue_broadcast(x: Tensor, src: int, group: Any) -> Tensor:
    """`x` of the group's rank `src`."""
    if x.is_complex():
        return torch.view_as_complex(issue_broadcast(_as_real(x), src, group))
    return c10d.end(*c10d.begin_broadcast(x, src, group))


def own_shard(x: Tensor, own: Tensor, dim: int, world: int) -> Tensor:
    """Part `own` of `world` equal parts of `dim`, a copy.

    narrow(dim, rank * n, n) would bake the rank into the graph; index_select with a tensor gives equal graphs on all
    ranks, without communication.
    """
    return x.unflatten(dim, (world, x.shape[dim] // world)).index_select(dim, own).squeeze(dim)


def zeros_around(part: Tensor, own: Tensor, dim: int, world: int) -> Tensor:
    """The transpose of `own_shard`: `part` in its place of `dim`, zeros in the other places."""
    place = torch.arange(world, device=part.device).view(-1, *[1] * (part.dim() - dim)) == own
    return torch.where(place, part.unsqueeze(dim), torch.zeros_like(part).unsqueeze(dim)).flatten(dim, dim + 1)


def stacked(x: Tensor, dim: int, world: int, sizes: Sizes = None) -> Tensor:
    """Parts of `dim`, padded to the largest, concatenated along dim 0."""
    if sizes is not None:
        return torch.cat([padded(part, dim, max(sizes)) for part in x.split(sizes, dim)], 0)
    return x if dim == 0 else torch.cat(x.chunk(world, dim), 0)


def joined(x: Tensor, dim: int, world: int, sizes: Sizes = None) -> Tensor:
    """The inverse of `stacked`."""
    if sizes is not None:
        parts = x.chunk(world, 0)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
    return x if dim == 0 else torch.cat(x.chunk(world, 0), dim)


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros appended up to `size` of `dim`."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    zeros = x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))
    return torch.cat((x, zeros), dim)


def to_wire(x: Tensor) -> Tensor:
    """Contiguous and real: c10d reads the raw memory, and ignores a lazy conjugate or negation."""
    if x.is_complex():
        return _as_real(x).contiguous()
    if not c10d.is_tracing() and x.is_neg():
        return x.resolve_neg().contiguous()
    return x.contiguous()


def from_wire(raw: Tensor, like: Tensor) -> Tensor:
    """Complex again where `like` is."""
    return torch.view_as_complex(raw) if like.is_complex() else raw


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj())
