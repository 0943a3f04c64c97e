"""Eager wrapper call -> the active observer: the SPMD type check, or the collective counter of `tpcompile.numerics`.

Without an observer, as in production, the eager path pays one comparison. Compiled graphs never contain the observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tpcompile.errors import ConfigError


@dataclass(frozen=True)
class Call:
    """One call of a collective wrapper, after validation and before it communicates."""

    name: str
    """Public name of the wrapper, e.g. `all_reduce`."""
    group: Any
    """Process group the wrapper resolved."""
    dst: str = ""
    """Type of the result, `I` or `R`; empty where the wrapper has no choice."""
    src: str = ""
    """Type of the input, `I` or `R`; empty where the wrapper has no choice."""
    op: str = ""
    """Reduce op; empty for a collective that reduces nothing."""
    dim: int | None = None
    """Tensor dim that is gathered or scattered; None where no dim is."""


class Observer(Protocol):
    """Sees every eager wrapper call over a group of more than one rank."""

    def observe(self, call: Call, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Return the result of the call, by `run()` or in a different tensor."""


class _Active:
    observer: Observer | None = None


active = _Active()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` see eager wrapper calls of this process; raises ConfigError when an observer is already active."""
    if active.observer is not None:
        raise ConfigError("a collective observer is already active; exit it first")
    active.observer = observer
    try:
        yield
    finally:
        active.observer = None
