"""Full state dict <-> the slices that one rank's module holds, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.layout import Layout, ShardSpec
from tpcompile.nn.sharding import Placement, placements_of


def load_full_state_dict(
    module: nn.Module,
    full: Mapping[str, Tensor],
    *,
    layouts: Mapping[str, Layout] | None = None,
    comm: TpComm | None = None,
) -> None:
    """Copy this rank's slice of every full tensor into `module`, bit for bit; padding becomes zeros.

    `layouts` and `comm` are for modules without `shard_specs()`, see `placements_of`. Raises ConfigError naming missing
    and unexpected keys, and any tensor of the wrong shape or dtype; nothing is copied then. Build on the meta device
    and call `to_empty` first.
    """
    placements = placements_of(module, layouts=layouts, comm=comm)
    parameters = dict(module.named_parameters())
    missing = sorted(set(placements) - set(full))
    unexpected = sorted(set(full) - set(placements))
    if missing or unexpected:
        raise ConfigError(f"state dict does not fit: missing {missing}, unexpected {unexpected}")
    for name, parameter in parameters.items():
        _check_fits(name, full[name], placements[name].spec, parameter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_taken(full[name], placements[name]))


def full_state_dict(
    module: nn.Module, *, layouts: Mapping[str, Layout] | None = None, comm: TpComm | None = None
) -> dict[str, Tensor]:
    """The unsharded state dict, on every rank: what `load_full_state_dict` takes, bit for bit, padding dropped.

    All ranks of the TP group must call it: it all-gathers one parameter at a time, in the order of the state dict.
    """
    placements = placements_of(module, layouts=layouts, comm=comm)
    return {name: _gathered(p.detach(), placements[name]) for name, p in module.named_parameters()}


def gather_full(
    name: str,
    local: Tensor,
    *,
    module: nn.Module,
    layouts: Mapping[str, Layout] | None = None,
    comm: TpComm | None = None,
) -> Tensor:
    """The unsharded form of a parameter, or of a tensor of its shape, from the slices of all ranks (a collective).

    Raises ConfigError for a name that is not a parameter of `module`.
    """
    return _gathered(local, _placement(name, placements_of(module, layouts=layouts, comm=comm)))


def local_slices_of(
    full: Mapping[str, Tensor],
    *,
    module: nn.Module,
    layouts: Mapping[str, Layout] | None = None,
    comm: TpComm | None = None,
) -> dict[str, Tensor]:
    """Name -> this rank's slice of that full parameter, or of a tensor of its shape, such as its gradient.

    Raises ConfigError for a name that is not a parameter of `module`.
    """
    placements = placements_of(module, layouts=layouts, comm=comm)
    return {name: _taken(tensor, _placement(name, placements)) for name, tensor in full.items()}


def _placement(name: str, placements: Mapping[str, Placement]) -> Placement:
    if name not in placements:
        raise ConfigError(f"{name!r} is no parameter of this module; it has {sorted(placements)}")
    return placements[name]


def _taken(full: Tensor, placement: Placement) -> Tensor:
    comm = placement.comm
    return full if comm is None else placement.spec.take(full, rank=comm.rank, size=comm.size)


def _gathered(local: Tensor, placement: Placement) -> Tensor:
    comm = placement.comm
    if comm is None or placement.owners is None:
        return local.clone()
    with torch.no_grad():
        gathered = comm.all_gather(local.unsqueeze(0).contiguous(), dim=0)
    return placement.spec.join(gathered.unbind(0))


def _check_fits(name: str, full: Tensor, spec: ShardSpec, parameter: nn.Parameter) -> None:
    expected = spec.full_shape(parameter.shape)
    if tuple(full.shape) != expected:
        raise ConfigError(f"{name}: full shape {tuple(full.shape)}, expected {expected}; pass the unsharded tensor")
    if full.dtype != parameter.dtype:
        raise ConfigError(f"{name}: dtype {full.dtype}, expected {parameter.dtype}; cast the state dict first")
