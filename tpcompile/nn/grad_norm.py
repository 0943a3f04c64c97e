"""Gradients of a parallel module -> their norm on one device, equal on all ranks, and gradients clipped to it.

A rank holds shards that no other rank has, weights that every rank has, rows that `replicas` ranks have (kv heads
packed in wqkv), and padding. Summed as they are, some elements would count once, some several times; and a norm of the
local gradients differs per rank, so that replicated weights are clipped differently and drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.collectives.strategies import Collectives, TpComm
from tpcompile.errors import ConfigError
from tpcompile.fastpath.plain import stat_dtype
from tpcompile.layout import Layout
from tpcompile.nn.sharding import Placement, placements_of


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    *,
    layouts: Mapping[str, Layout] | None = None,
    comm: TpComm | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` under TP: scale all gradients in place, and return their norm before that.

    Call it on all ranks of the TP group, with the whole module, after the backward pass; arguments and errors are those
    of `grad_norm`.
    """
    norm = grad_norm(module, layouts=layouts, comm=comm)
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


@torch.no_grad()
def grad_norm(module: nn.Module, *, layouts: Mapping[str, Layout] | None = None, comm: TpComm | None = None) -> Tensor:
    """2-norm of all gradients as on one device, the same number on all ranks; a scalar, by one all-reduce of it.

    Accumulates in float32, float64 for float64. Gradients that FSDP2 shards again (DTensors) are summed over that mesh
    too, by one more all-reduce. `layouts` and `comm` are for modules without `shard_specs()`, see `placements_of`.
    Raises ConfigError as that, and for a module whose parts are sharded over different groups.
    """
    placements = placements_of(module, layouts=layouts, comm=comm)
    owners = [placement.owners for placement in placements.values()]
    found = {each.group: each for each in owners if each is not None}
    if len(found) > 1:
        raise ConfigError(
            f"parameters are sharded over {len(found)} groups; take the norm of the parts over each group alone"
        )
    ranks = next(iter(found.values()), comm or Collectives(None))
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    sums = [_own_sum(grad, placements[name], ranks) for name, grad in grads.items()]
    # Of the dtype that sums of squares have, equal on all ranks, whichever gradients they hold.
    parameters = list(module.parameters())
    is_double = any(stat_dtype(parameter.dtype) == torch.float64 for parameter in parameters)
    device = parameters[0].device if parameters else None
    total = torch.zeros((), dtype=torch.float64 if is_double else torch.float32, device=device)
    for own in _over_their_mesh(sums):
        total = total + own
    return ranks.all_reduce(total, dst="I").sqrt()  # partial -> replicated


def _own_sum(grad: Tensor, placement: Placement, ranks: TpComm) -> Tensor:
    """What this rank adds to the sum of squares: each element divided by the number of ranks that have it."""
    if placement.owners is None:
        return _square_sum(grad) / ranks.size
    spec = placement.spec
    assert spec.dim is not None
    shares = [part.share(ranks.size) for part in spec.packed]
    real = [part.rows(rank=ranks.rank, tp=ranks.size)[1] for part in spec.packed]
    replicas = {part.replicas for part in spec.packed}
    if real == shares and len(replicas) == 1:
        return _square_sum(grad) / replicas.pop()
    sums = []
    for part, rows, count in zip(spec.packed, grad.split(shares, spec.dim), real, strict=True):
        own_rows = rows.narrow(spec.dim, 0, count)
        sums.append(_square_sum(own_rows) / part.replicas)
    return sum(sums[1:], sums[0])


def _square_sum(grad: Tensor) -> Tensor:
    dtype = stat_dtype(grad.dtype)
    if isinstance(grad, DTensor):
        return grad.to(dtype).square().sum()  # stays a partial sum over its mesh
    return torch.linalg.vector_norm(grad, dtype=dtype).square()


def _over_their_mesh(sums: list[Tensor]) -> list[Tensor]:
    """The sums as plain tensors: those of DTensors added up, then summed over their mesh once."""
    plain = [own for own in sums if not isinstance(own, DTensor)]
    meshed = [own for own in sums if isinstance(own, DTensor)]
    if meshed:
        plain.append(sum(meshed[1:], meshed[0]).full_tensor())
    return plain
