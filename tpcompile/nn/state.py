"""Block configuration and seed -> full weights and inputs, equal on all ranks; full weights -> one rank's slice.

Scales differ per head (0.25 to 4): on iid data a norm over the local shard is off by 1 % only, the size of a bf16
tolerance, while on head-skewed data it is off by more than half.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.config import BlockConfig
from tpcompile.dist.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.sharding import ShardSpec, specs_of, stat_dtype

_NORM_SPREAD, _BIAS_SCALE, _ROPE_BASE = 0.2, 0.1, 10000.0


def full_state_dict(
    config: BlockConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Unsharded weights of a `TransformerStack(config, ...)`, no bias zero and no norm weight one.

    Drawn in float32 and cast, so that another dtype holds the same numbers, rounded. q and k rows are head-skewed.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        twin = TransformerStack(config, Collectives(None))
    specs = specs_of(twin)
    shapes = {name: tuple(parameter.shape) for name, parameter in twin.named_parameters()}
    return {name: _draw(specs[name], shapes[name], generator).to(dtype) for name in shapes}


def load_full_state_dict(module: nn.Module, full: dict[str, Tensor]) -> None:
    """Copy this rank's slice of every full tensor into `module`, bit for bit.

    Raises ConfigError naming missing and unexpected keys, and any tensor of another shape or dtype than expected;
    nothing is copied then. Build on the meta device and call `to_empty` first.
    """
    specs, parameters = specs_of(module), dict(module.named_parameters())
    missing, unexpected = sorted(set(specs) - set(full)), sorted(set(full) - set(specs))
    if missing or unexpected:
        raise ConfigError(f"state dict does not fit: missing {missing}, unexpected {unexpected}")
    for name, parameter in parameters.items():
        _check_fits(name, full[name], specs[name], parameter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(local_slice_of(name, full[name], module=module))


def local_slice_of(name: str, full: Tensor, *, module: nn.Module) -> Tensor:
    """This rank's slice of a full parameter, or of anything shaped like it, such as its gradient.

    Raises ConfigError for a name that is no parameter of `module`.
    """
    owner_name, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        owner = None
    specs = owner.shard_specs() if owner is not None and hasattr(owner, "shard_specs") else {}
    if leaf not in specs:
        raise ConfigError(f"{name!r} is no parameter of this module; it has {sorted(specs_of(module))}")
    comm = getattr(owner, "comm", None)
    return full if comm is None else specs[leaf].take(full, rank=comm.rank, size=comm.size)


def make_inputs(
    config: BlockConfig, *, seed: int, device: torch.device | str, dtype: torch.dtype, seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(x [B, S, D] in `dtype`, cos [S, E / 2], sin [S, E / 2]); tables in float32, float64 for float64.

    x is drawn in float32 and skewed per head-sized chunk of D.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(config.batch, seq_len, config.dim, generator=generator, device=device)
    x *= head_scales(config.num_heads, config.dim, device=device)
    pairs = torch.arange(config.head_dim // 2, device=device, dtype=torch.float64)
    positions = torch.arange(seq_len, device=device, dtype=torch.float64)
    angles = positions[:, None] * _ROPE_BASE ** (-pairs / pairs.numel())
    table_dtype = stat_dtype(dtype)
    return x.to(dtype), angles.cos().to(table_dtype), angles.sin().to(table_dtype)


def head_scales(num_heads: int, width: int, *, device: torch.device | str) -> Tensor:
    """[width], constant per head, from 0.25 to 4 over the heads; a negative `num_heads` goes from 4 to 0.25."""
    scales = torch.logspace(-2, 2, abs(num_heads), base=2, device=device)
    scales = scales.flip(0) if num_heads < 0 else scales
    return scales.repeat_interleave(width // abs(num_heads))


def _draw(spec: ShardSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if spec.kind == "norm":
        return 1 + _NORM_SPREAD * noise
    noise *= shape[-1] ** -0.5 if spec.kind == "weight" else _BIAS_SCALE
    if not any(spec.head_skew):
        return noise
    pairs = zip(noise.split(spec.parts, 0), spec.parts, spec.head_skew, strict=True)
    for part, size, heads in pairs:
        if heads:
            part *= head_scales(heads, size, device=generator.device).view(-1, *[1] * (noise.dim() - 1))
    return noise


def _check_fits(name: str, full: Tensor, spec: ShardSpec, parameter: nn.Parameter) -> None:
    expected = spec.full_shape(parameter.shape)
    if tuple(full.shape) != expected:
        raise ConfigError(f"{name}: full shape {tuple(full.shape)}, expected {expected}; pass the unsharded tensor")
    if full.dtype != parameter.dtype:
        raise ConfigError(f"{name}: dtype {full.dtype}, expected {parameter.dtype}; cast the state dict first")
