"""Declaration of a parameter's layout over the TP group -> its full shape, and one rank's slice of a full tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tpcompile.errors import ConfigError, TpCompileError
from tpcompile.evidence.records import Collective

Kind = Literal["weight", "bias", "norm"]
_DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64", torch.float16: "f16"}


@dataclass(frozen=True)
class ShardSpec:
    """How one parameter is laid out; a module says so in `shard_specs()`, nobody guesses from names."""

    kind: Kind
    """What the numbers are, which decides their scale in `full_state_dict`."""
    dim: int | None = None
    """Sharded dim; None for a replicated parameter."""
    parts: tuple[int, ...] = ()
    """Full sizes of what is packed along `dim`, each sharded on its own; one entry when nothing is packed."""
    head_skew: tuple[int, ...] = ()
    """Per part, the number of heads whose scales are spread in test weights; negative reverses them, 0 is none."""

    def full_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the unsharded parameter."""
        shape = list(local_shape)
        if self.dim is not None:
            shape[self.dim] = sum(self.parts)
        return tuple(shape)

    def take(self, full: Tensor, *, rank: int, size: int) -> Tensor:
        """Slice of rank `rank` of `size`: from every part its own share, never a chunk of the packed tensor."""
        if self.dim is None or size == 1:
            return full
        shares = [p // size for p in self.parts]
        pieces = zip(full.split(self.parts, self.dim), shares, strict=True)
        return torch.cat([part.narrow(self.dim, rank * share, share) for part, share in pieces], self.dim)


@runtime_checkable
class Sharded(Protocol):
    """A module that declares its own parameters' layout."""

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Own parameter name -> layout."""
        ...


@dataclass(frozen=True)
class Declared:
    """Collectives a module issues in mode C, in issue order; a backward list holds for training only."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()

    def then(self, after: Declared) -> Declared:
        """This module followed by `after`: the backward pass visits `after` first."""
        return Declared(self.forward + after.forward, after.backward + self.backward)

    def select(self, *, train: bool) -> tuple[Collective, ...]:
        """Forward, and with `train` the backward after it."""
        return self.forward + (self.backward if train else ())


def declared_sum(phase: str, shape: Sequence[int], dtype: torch.dtype) -> Collective:
    """One sum all-reduce over the TP group, as a digest of the compiled graph spells it."""
    printed = str(list(shape))
    return Collective(
        phase=phase, op="all_reduce", reduce_op="sum", dtype=_DTYPE_NAMES[dtype], shape=printed, group="tp"
    )


def specs_of(module: nn.Module) -> dict[str, ShardSpec]:
    """Layout of every parameter of `module`, keyed like its state dict.

    Raises TpCompileError when a parameter is not declared or a declaration has no parameter.
    """
    specs: dict[str, ShardSpec] = {}
    for prefix, child in module.named_modules():
        if isinstance(child, Sharded):
            specs |= {f"{prefix}.{name}" if prefix else name: spec for name, spec in child.shard_specs().items()}
    names = {name for name, _ in module.named_parameters()}
    if undeclared := sorted(names ^ set(specs)):
        raise TpCompileError(f"parameters and shard_specs() disagree on {undeclared}; declare each parameter once")
    return specs


def share_of(name: str, full: int, *, size: int) -> int:
    """`full / size`; raises ConfigError when it is not whole."""
    if full % size:
        good = [n for n in _divisors(full) if n <= 64]
        raise ConfigError(f"{name}={full} is not divisible by tp={size}; choose tp from {good}")
    return full // size


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of norm statistics: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _divisors(n: int) -> Iterator[int]:
    return (k for k in range(1, n + 1) if n % k == 0)
