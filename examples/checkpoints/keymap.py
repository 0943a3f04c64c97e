"""State dict of a checkpoint <-> full state dict of our modules: names changed, parts packed along dim 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from tpcompile.errors import ConfigError

_SHOWN = 8


@dataclass(frozen=True)
class Source:
    """Tensors of a checkpoint that make up one of our parameters."""

    keys: tuple[str, ...]
    """Their names, in the order in which they are packed."""
    rows: tuple[int, ...] = ()
    """Rows of each, where several are packed."""


@dataclass(frozen=True)
class KeyMap:
    """Which tensors of a checkpoint make up which of our parameters, for one model of one family."""

    family: str
    """Name of the model family, for error messages."""
    sources: dict[str, Source]
    """Our parameter -> where it comes from."""
    outside: tuple[str, ...] = ()
    """Beginnings of keys for parts of the model that we do not build; left alone."""
    derived: tuple[str, ...] = ()
    """Endings of keys that hold no weights, such as tables that old checkpoints saved; left alone."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Key of a tied parameter -> the key that holds it; may be absent, and must hold the same numbers otherwise."""

    def to_full(self, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> Mapping[str, Tensor]:
        """The argument of `load_full_state_dict`, bit for bit unless `dtype` asks for a cast.

        Tensors are read and packed on access and not kept, so that a `state` which reads lazily may be larger than
        memory. Raises ConfigError naming missing and unknown keys at once, and on access a packed tensor
        of wrong shape or dtype.
        """
        known = set(chain.from_iterable(source.keys for source in self.sources.values()))
        missing = sorted(known - set(state))
        extra = sorted(set(state) - known)
        unknown = [key for key in extra if not self._is_left_alone(key)]
        if missing or unknown:
            raise ConfigError(f"not a {self.family} state dict: missing {_some(missing)}, unknown {_some(unknown)}")
        self._check_tied(state)
        return _Packing(self.sources, state, dtype)

    def to_checkpoint(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors, or tensors of their shapes such as gradients, by their own names; packed ones
        are views. Tied tensors come once, as safetensors files have them. Raises ConfigError naming missing and
        unknown keys.
        """
        missing = sorted(set(self.sources) - set(full))
        unknown = sorted(set(full) - set(self.sources))
        if missing or unknown:
            raise ConfigError(
                f"not the parameters of a {self.family}: missing {_some(missing)}, unknown {_some(unknown)}"
            )
        state: dict[str, Tensor] = {}
        for name, source in self.sources.items():
            parts = full[name].split(source.rows) if source.rows else (full[name],)
            state |= zip(source.keys, parts, strict=True)
        return state

    def _check_tied(self, state: Mapping[str, Tensor]) -> None:
        for alias, key in self.aliases.items():
            if alias in state and not torch.equal(state[alias], state[key]):
                raise ConfigError(
                    f"{alias} differs from {key}, but the config ties them; set tie_word_embeddings=False, "
                    "or drop the stale one"
                )

    def _is_left_alone(self, key: str) -> bool:
        return key.startswith(self.outside) or key.endswith(self.derived) or key in self.aliases


def linear(ours: str, theirs: Sequence[str], *, rows: Sequence[int] = (), bias: bool) -> dict[str, Source]:
    """Weight, and bias if there is one, of linears that ours packs."""
    leaves = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{leaf}": Source(tuple(f"{key}.{leaf}" for key in theirs), tuple(rows)) for leaf in leaves}


class _Packing(Mapping[str, Tensor]):
    """Our parameters, made of a checkpoint's tensors on access."""

    def __init__(self, sources: Mapping[str, Source], state: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self.sources, self.state, self.dtype = sources, state, dtype

    def __getitem__(self, name: str) -> Tensor:
        source = self.sources[name]
        parts = [self.state[key] for key in source.keys]
        if source.rows:
            _check_packed(source, parts)
        full = torch.cat(parts) if len(parts) > 1 else parts[0]
        return full if self.dtype is None else full.to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def _check_packed(source: Source, parts: Sequence[Tensor]) -> None:
    """Sizes that are wrong one by one may add up, and a cat of two dtypes is not bit for bit."""
    for key, rows, part in zip(source.keys, source.rows, parts, strict=True):
        if part.shape[0] != rows or part.dtype != parts[0].dtype or part.shape[1:] != parts[0].shape[1:]:
            like = f"{[rows, *parts[0].shape[1:]]} {parts[0].dtype} as {source.keys[0]}"
            raise ConfigError(f"{key} is {list(part.shape)} {part.dtype}, expected {like}; is it the right config?")


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{list(keys[:_SHOWN])}{more}"
