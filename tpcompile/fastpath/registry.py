"""Fast paths: fused kernels that replace plain code, and what each assumes of the tensors that it is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch

from tpcompile.errors import ConfigError
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath.source import Source, source_of

_TP_SIZE: ContextVar[int | None] = ContextVar("tp_size", default=None)
_ENTERED: list[int] = []
"""Sizes of all regions that are entered, in any thread: the backward of a GPU runs in a thread of autograd's own."""
_REGISTERED: dict[str, FastPath] = {}


class TpSupport(StrEnum):
    """What makes a fused kernel right on the shards of a tensor-parallel group."""

    NONE = "none"
    """Nothing: it takes what it is given for the whole tensor."""
    PER_HEAD = "per_head"
    """All that it reduces over lies within one head, and a head is whole on its rank."""
    PER_TOKEN = "per_token"
    """All that it reduces over lies within one token, whose width is whole on its rank."""
    DISTRIBUTED_STATS = "distributed_stats"
    """It reduces its statistics over the group."""
    POINTWISE = "pointwise"
    """It reduces nothing."""


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """One fused kernel with its launcher."""

    name: str
    replaces: Callable[..., Any]
    """The plain code with the same result."""
    tp: TpSupport
    launcher: Callable[..., Any] = field(repr=False, compare=False)
    line: UserLine
    """Place of the launcher."""
    contiguous: tuple[str, ...] = ()
    """Arguments that must be contiguous."""
    divisible: Mapping[str, int] = field(default_factory=dict)
    """Argument -> what must divide it: the number itself, or the size of a tensor's last dim."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Element types of its floating-point tensors; empty for any."""
    autograd: bool = False
    """True when it has a backward."""
    min_sm: int = 0
    """Least compute capability, 90 for Hopper."""
    files: tuple[str, ...] = ()
    """What it reads besides the files that its source names, relative to its own file."""

    @cached_property
    def source(self) -> Source:
        """What it runs, as it is when this is first read: modules have defined all that a launcher names by then.

        Raises ConfigError when a declared file is not there.
        """
        return source_of(self.launcher, reference=self.replaces, files=self.files)

    @property
    def is_tp_aware(self) -> bool:
        """True when it is right on a shard."""
        return self.tp != TpSupport.NONE

    @property
    def exchanges(self) -> bool:
        """True when its kernels wait for the other ranks: its launcher takes an `exchange`."""
        return "exchange" in inspect.signature(self.launcher).parameters

    @property
    def names(self) -> frozenset[str]:
        """Its ops and its Triton kernels, as they stand in graphs."""
        return self.source.kernels | self.source.ops

    def __str__(self) -> str:
        return f"{self.name} (tp {self.tp}, source {self.source.sha256}) at {self.line}"


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16, as certificates and tables of measurements have it."""
    return str(dtype).removeprefix("torch.")


def registered() -> dict[str, FastPath]:
    """All fast paths of this process by name."""
    return dict(_REGISTERED)


@contextmanager
def tp_region(size: int) -> Iterator[None]:
    """Code in which tensors are shards of a group of `size` ranks: with more than one, fast paths must be TP-aware.

    It holds for this thread, and for threads that have entered no region: those in which autograd runs a backward.
    """
    token = _TP_SIZE.set(size)
    _ENTERED.append(size)
    try:
        yield
    finally:
        _ENTERED.remove(size)
        _TP_SIZE.reset(token)


def tp_size() -> int:
    """Size of the innermost `tp_region` of this thread; in one without, the largest that any thread has entered."""
    own = _TP_SIZE.get()
    return max(_ENTERED, default=1) if own is None else own


def add(path: FastPath) -> None:
    """Register it; ConfigError when a different one has its name."""
    known = _REGISTERED.get(path.name)
    if known is not None and (known.line.file, known.line.function) != (path.line.file, path.line.function):
        raise ConfigError(f"two fast paths are called {path.name}: at {known.line} and at {path.line}; rename one")
    _REGISTERED[path.name] = path  # a module that is imported again has it anew
