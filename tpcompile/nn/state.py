"""Full state dict <-> the slices that one rank's module holds, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.nn.sharding import ShardSpec, specs_of


def load_full_state_dict(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Copy this rank's slice of every full tensor into `module`, bit for bit; padding becomes zeros.

    Raises ConfigError naming missing and unexpected keys, and any tensor of the wrong shape or dtype; nothing is copied
    then. Build on the meta device and call `to_empty` first.
    """
    specs = specs_of(module)
    parameters = dict(module.named_parameters())
    missing = sorted(set(specs) - set(full))
    unexpected = sorted(set(full) - set(specs))
    if missing or unexpected:
        raise ConfigError(f"state dict does not fit: missing {missing}, unexpected {unexpected}")
    for name, parameter in parameters.items():
        _check_fits(name, full[name], specs[name], parameter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(local_slice_of(name, full[name], module=module))


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The unsharded state dict, on every rank: what `load_full_state_dict` takes, bit for bit, padding dropped.

    All ranks of the TP group must call it: it all-gathers one parameter at a time, in the order of the state dict.
    """
    return {name: gather_full(name, parameter.detach(), module=module) for name, parameter in module.named_parameters()}


def gather_full(name: str, local: Tensor, *, module: nn.Module) -> Tensor:
    """The unsharded form of a parameter, or of a tensor of its shape, from the slices of all ranks (a collective).

    Raises ConfigError for a name that is not a parameter of `module`.
    """
    spec, comm = _layout(name, module)
    if spec.dim is None or comm is None or comm.size == 1:
        return local.clone()
    with torch.no_grad():
        gathered = comm.all_gather(local.unsqueeze(0).contiguous(), dim=0)
    return spec.join(gathered.unbind(0))


def local_slice_of(name: str, full: Tensor, *, module: nn.Module) -> Tensor:
    """This rank's slice of a full parameter, or of a tensor of its shape, such as its gradient.

    Raises ConfigError for a name that is not a parameter of `module`.
    """
    spec, comm = _layout(name, module)
    return full if comm is None else spec.take(full, rank=comm.rank, size=comm.size)


def _layout(name: str, module: nn.Module) -> tuple[ShardSpec, TpComm | None]:
    owner_name, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        owner = None
    shard_specs = getattr(owner, "shard_specs", dict)
    specs: Mapping[str, ShardSpec] = shard_specs()
    if leaf not in specs:
        raise ConfigError(f"{name!r} is no parameter of this module; it has {sorted(specs_of(module))}")
    return specs[leaf], getattr(owner, "comm", None)


def _check_fits(name: str, full: Tensor, spec: ShardSpec, parameter: nn.Parameter) -> None:
    expected = spec.full_shape(parameter.shape)
    if tuple(full.shape) != expected:
        raise ConfigError(f"{name}: full shape {tuple(full.shape)}, expected {expected}; pass the unsharded tensor")
    if full.dtype != parameter.dtype:
        raise ConfigError(f"{name}: dtype {full.dtype}, expected {parameter.dtype}; cast the state dict first")
