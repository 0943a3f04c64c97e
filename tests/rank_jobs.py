"""Top-level function -> its result on each of N gloo ranks, forked from a process that has imported torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import tests.forked  # noqa: F401 - says what the server imports before the first fork
from tpcompile.ranks import processes
from tpcompile.torch_api.forked import new_trace_handler

__all__ = ["STORE", "run_on_fresh_ranks", "run_on_ranks"]

STORE = "TPCOMPILE_TEST_STORE"
"""Port of a store that outlives the ranks, as that of torchrun's agent does."""


def run_on_ranks(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`tpcompile.ranks.processes.run_on_ranks` in seconds less: with the variables of now, and torch imported."""
    with _served_store():
        return processes.run_on_ranks(_with_environ, dict(os.environ), fn, args, start_method="forkserver", **options)


def run_on_fresh_ranks(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Spawned: for what Python or torch reads when it starts, and for what a program imports."""
    with _served_store():
        return processes.run_on_ranks(fn, *args, **options)


@contextmanager
def _served_store() -> Iterator[None]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ[STORE] = str(server.port)
    try:
        yield
    finally:
        del os.environ[STORE]


def _with_environ(environ: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The server of forks has the variables of its own start, and torch read TORCH_TRACE there."""
    os.environ.clear()
    os.environ.update(environ)
    new_trace_handler()
    return fn(*args)
