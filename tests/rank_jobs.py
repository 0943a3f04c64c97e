"""Top-level function -> its result on each of N gloo ranks, forked from a process that has imported torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tests import rank_server
from tpcompile.ranks import processes

__all__ = ["STORE", "run_on_fresh_ranks", "run_on_ranks"]

STORE = "TPCOMPILE_TEST_STORE"
"""Port of a store that outlives the ranks, as that of torchrun's agent does."""


def run_on_ranks(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`tpcompile.ranks.processes.run_on_ranks` in seconds less: ranks are forked, with the variables of now."""
    with _served_store():
        return processes.run_in(rank_server.Context, fn, args, **options)


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
