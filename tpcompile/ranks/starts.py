"""A call of `run_on_ranks`, and what starts its ranks; without torch.

The pytest plugin registers a start that forks the ranks from the server of its session. Without one they are spawned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Call:
    """What every rank runs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    collective_timeout_s: float
    folder: Path
    """For the result or the traceback of each rank."""


ExitCodes: TypeAlias = Callable[[], list[int | None]]
"""Exit codes by rank, negative for a signal, None for a rank that runs; RuntimeError when they are lost."""
Start: TypeAlias = Callable[[Call], AbstractContextManager[ExitCodes]]
"""Starts the ranks of a call; the end of `with` kills those that still run and returns when none does."""

_REGISTERED: list[Start] = []


def register(start: Start) -> Callable[[], None]:
    """Start ranks so from now on, unless a call names a start method; returns what undoes it."""
    _REGISTERED.append(start)
    return functools.partial(_REGISTERED.remove, start)


def registered() -> Start | None:
    """The last one that is registered."""
    return _REGISTERED[-1] if _REGISTERED else None
