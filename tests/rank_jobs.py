"""Top-level function -> its result on each of N gloo ranks, forked from a process that has imported torch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import tests.forked  # noqa: F401 - says what the server imports before the first fork
from tests.interpreting import import_triton_as_asked
from tpcompile.ranks import processes
from tpcompile.torch_api.forked import new_trace_handler

__all__ = ["STORE", "run_on_fresh_ranks", "run_on_ranks"]

STORE = "TPCOMPILE_TEST_STORE"
"""Port of a store that outlives the ranks, as that of torchrun's agent does."""


def run_on_ranks(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`tpcompile.ranks.processes.run_on_ranks` in seconds less: with the variables of now, and torch imported."""
    with _served_store():
        return processes.run_on_ranks(_Job(fn, args), start_method="forkserver", **options)


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


class _Job:
    """A function of ranks. In the process of a rank it first sets the variables of the process that asked for it.

    The server of forks has those of its own start, torch read TORCH_TRACE there, and what the function imports may read
    them as well.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args

    def __getstate__(self) -> tuple[dict[str, str], bytes]:
        return dict(os.environ), pickle.dumps((self.fn, self.args))

    def __setstate__(self, state: tuple[dict[str, str], bytes]) -> None:
        environ, job = state
        os.environ.clear()
        os.environ.update(environ)
        new_trace_handler()
        import_triton_as_asked()
        self.fn, self.args = pickle.loads(job)

    def __call__(self) -> Any:
        return self.fn(*self.args)
