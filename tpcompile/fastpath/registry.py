"""Fast paths: fused kernels that replace plain code, and what each assumes of the tensors that it is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from tpcompile.errors import ConfigError, FastPathError
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath.source import Source, python_function, source_of
from tpcompile.torch_api import compiler as compat

_TP_SIZE: ContextVar[int] = ContextVar("tp_size", default=1)
_REGISTERED: dict[str, FastPath] = {}


class TpSupport(StrEnum):
    """What makes a fused kernel right on the shards of a tensor-parallel group."""

    NONE = "none"
    """Nothing: it takes what it is given for the whole tensor."""
    PER_HEAD = "per_head"
    """All that it reduces over lies within one head, and a head is whole on its rank."""
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
    source: Source
    launcher: Callable[..., Any] = field(repr=False, compare=False)
    line: UserLine
    """Where the launcher is."""
    op: str = ""
    """`namespace::op` in graphs, where the launcher is a custom op."""
    contiguous: tuple[str, ...] = ()
    """Arguments that must be contiguous."""
    divisible: Mapping[str, int] = field(default_factory=dict)
    """Size -> what must divide it."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Element types that it takes; empty for any."""
    autograd: bool = False
    """True when it has a backward."""
    min_sm: int = 0
    """Least compute capability, 90 for Hopper."""

    @property
    def is_tp_aware(self) -> bool:
        """True when it is right on a shard."""
        return self.tp != TpSupport.NONE

    @property
    def names(self) -> frozenset[str]:
        """Its ops and its Triton kernels, as they stand in graphs."""
        return self.source.kernels | self.source.ops

    def __str__(self) -> str:
        return f"{self.name} (tp {self.tp}, source {self.source.sha256}) at {self.line}"


def fast_path(
    name: str,
    *,
    replaces: Callable[..., Any],
    tp: TpSupport | str = TpSupport.NONE,
    contiguous: tuple[str, ...] = (),
    divisible: Mapping[str, int] | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    autograd: bool = False,
    min_sm: int = 0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the launcher of a fused kernel, a function or a custom op, under a name of its own.

    In eager, inside `tp_region`, a call of one that is not TP-aware raises FastPathError; in compiled code the gate and
    `check_ranks` refuse it. Raises ConfigError for a `tp` that is not a `TpSupport`, a name that is taken, and a
    launcher without source.
    """
    supports = _supported(name, tp)

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        path = FastPath(
            name=name,
            replaces=replaces,
            tp=supports,
            source=source_of(launcher),
            launcher=launcher,
            line=_line_of(launcher),
            op=compat.custom_op_name(launcher),
            contiguous=contiguous,
            divisible=dict(divisible or {}),
            dtypes=dtypes,
            autograd=autograd,
            min_sm=min_sm,
        )
        _add(path)
        return _guarded(path, launcher)

    return register


def registered() -> dict[str, FastPath]:
    """All fast paths of this process by name."""
    return dict(_REGISTERED)


@contextmanager
def tp_region(size: int) -> Iterator[None]:
    """Code in which tensors are shards of a group of `size` ranks: with more than one, fast paths must be TP-aware."""
    token = _TP_SIZE.set(size)
    try:
        yield
    finally:
        _TP_SIZE.reset(token)


def _supported(name: str, tp: TpSupport | str) -> TpSupport:
    try:
        return TpSupport(tp)
    except ValueError as error:
        raise ConfigError(f"fast path {name}: tp={tp!r} is none of {', '.join(TpSupport)}") from error


def _line_of(launcher: Callable[..., Any]) -> UserLine:
    function = python_function(launcher)
    assert function is not None, "its source was read"
    file = inspect.getsourcefile(function) or "?"
    return UserLine(file=file, line=function.__code__.co_firstlineno, function=function.__qualname__)


def _add(path: FastPath) -> None:
    known = _REGISTERED.get(path.name)
    if known is not None and (known.line.file, known.line.function) != (path.line.file, path.line.function):
        raise ConfigError(f"two fast paths are called {path.name}: at {known.line} and at {path.line}; rename one")
    _REGISTERED[path.name] = path  # a module that is imported again has it anew


def _guarded(path: FastPath, launcher: Callable[..., Any]) -> Callable[..., Any]:
    if path.is_tp_aware:
        return launcher

    @functools.wraps(launcher)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _TP_SIZE.get() > 1:
            raise FastPathError(
                f"fast path {path.name} is not TP-aware (tp={path.tp}) and was called where tensors are shards of "
                f"{_TP_SIZE.get()} ranks; call {path.replaces.__name__} there"
            )
        return launcher(*args, **kwargs)

    return call
