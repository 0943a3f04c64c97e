"""A rank that refuses a call whose kernels wait for each other -> the same error, by its text, on its peers.

The peers have launched and wait to the limit of their exchange. What the rank raised goes through the store, once and
only then, so `check` can name it beside the rank that did not arrive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from tpcompile.errors import FastPathError
from tpcompile.ranks.store import RankStore

_TIMEOUT_S = 5.0
"""To connect to the store."""


class Exchange(Protocol):
    """What is asked of `fastpath.kernels.exchange_memory.Exchange`, whose module imports Triton."""

    @property
    def group(self) -> Any:
        """Whose ranks it joins; None when it was made from addresses."""

    def check(self) -> None:
        """Raise FastPathError when a wait ran out."""


_LIVE: weakref.WeakSet[Exchange] = weakref.WeakSet()
"""Those that this process calls kernels with."""


def follow(exchange: Exchange) -> None:
    """Have `failure` look at it, as long as it is in use: those of `use_fast_paths`, and of calls in eager."""
    _LIVE.add(exchange)


def failure() -> Exception | None:
    """What `check` raises for one of the exchanges that are followed, or the device does; waits for the device."""
    try:
        for exchange in list(_LIVE):
            check(exchange)
    except (FastPathError, RuntimeError) as error:  # RuntimeError: of the device
        return error
    return None


def check(exchange: Exchange) -> None:
    """Raise FastPathError when a wait ran out, with what ranks of its group raised before a launch."""
    try:
        exchange.check()
    except FastPathError as error:
        raised = [f"rank {rank} raised FastPathError: {text}" for rank, text in _refusals(exchange.group).items()]
        raise FastPathError("; ".join([str(error), *raised])) from None


@contextmanager
def telling() -> Iterator[None]:
    """Publish a FastPathError that is raised inside, for the peers of this rank."""
    try:
        yield
    except FastPathError as error:
        _tell(str(error))
        raise


def _tell(text: str) -> None:
    store = _store()
    if store is not None:
        store.put(str(store.rank), text)


def _refusals(group: Any) -> dict[int, str]:
    """Rank of the job -> what it raised last; empty without a group or a store."""
    store = _store() if group is not None else None
    if store is None:
        return {}
    found = {rank: store.peek(str(rank)) for rank in dist.get_process_group_ranks(group)}
    return {rank: text for rank, text in found.items() if text is not None}


def _store() -> RankStore | None:
    """None in a program of one process, and where the store cannot be reached: the FastPathError matters more."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        return RankStore.connect("tpcompile/fastpath/refused", rank=rank, world_size=world_size, timeout_s=_TIMEOUT_S)
    except (RuntimeError, ValueError):
        return None
