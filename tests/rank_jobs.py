"""Top-level function -> its result on each of N gloo ranks, forked from a process that has imported torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tests.forked  # noqa: F401 - says what the server imports before the first fork
from tpcompile.ranks import processes
from tpcompile.torch_api.forked import new_trace_handler

__all__ = ["run_on_fresh_ranks", "run_on_ranks"]

run_on_fresh_ranks = processes.run_on_ranks
"""Spawned: for what Python or torch reads when it starts, and for what a program imports."""


def run_on_ranks(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`tpcompile.ranks.processes.run_on_ranks` in seconds less: with the variables of now, and torch imported."""
    return processes.run_on_ranks(_with_environ, dict(os.environ), fn, args, start_method="forkserver", **options)


def _with_environ(environ: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The server of forks has the variables of its own start, and torch read TORCH_TRACE there."""
    os.environ.clear()
    os.environ.update(environ)
    new_trace_handler()
    return fn(*args)
