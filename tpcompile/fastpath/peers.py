"""A rank that refuses a call whose kernels wait for each other -> the same error, by its text, on its peers.

What the rank raised goes through the store, once and only then. If its peers do not refuse the same call, it closes the
exchanges of their group: kernels that wait for it end, and `check` raises with its text. It goes with the number of the
call: a call that all ranks refused alike closes nothing and explains nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.bounds import Number
from tpcompile.fastpath.in_turn import Turns
from tpcompile.ranks.store import RankStore

_TIMEOUT_S = 30.0
"""Limit to connect to the store, which may take seconds on a busy machine. Without the store, peers get no reason."""
_ALIKE_S = 0.5
"""How long a rank that refused a call looks whether its peers do."""


class _Refusal(Frozen):
    """What a rank raised last."""

    number: Number
    """Number of the call that was refused."""
    text: str


class Exchange(Protocol):
    """What is asked of `fastpath.kernels.exchange_memory.Exchange`, whose module imports Triton."""

    @property
    def group(self) -> Any:
        """Whose ranks it joins; None when it was made from addresses."""

    @property
    def name(self) -> str:
        """Equal on the ranks that it joins, different for each of their exchanges."""

    @property
    def turns(self) -> Turns:
        """Calls of this process with it."""

    @property
    def state(self) -> Tensor:
        """What its kernels are given."""

    def check(self) -> None:
        """Raise FastPathError when a wait ran out, or a rank has closed it."""

    def close(self) -> None:
        """End all waits for this rank, on every rank."""


_LIVE: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
"""All exchanges of this process, by the address of their state."""


def follow(exchange: Exchange) -> None:
    """Have `failure` look at it, as long as it is in use."""
    _LIVE[exchange.state.data_ptr()] = exchange


def failure() -> Exception | None:
    """What `check` raises for one of the exchanges of this process, or the device does; waits for the device."""
    live = list(_LIVE.values())
    try:
        for exchange in live:
            check(exchange)
    except (FastPathError, RuntimeError) as error:  # RuntimeError: of the device
        return error
    return None


def check(exchange: Exchange) -> None:
    """Raise FastPathError when a wait ran out or a rank refused, with what ranks raised before a launch."""
    try:
        exchange.check()
    except FastPathError as error:
        raised = [f"rank {rank} raised FastPathError: {text}" for rank, text in _refusals(exchange).items()]
        raise FastPathError("; ".join([str(error), *raised])) from None


@contextmanager
def calling(exchange: Exchange | None) -> Iterator[None]:
    """A call in eager: what it refuses is published for the peers of this rank, unless `launching` has done so."""
    before = exchange.turns.count if exchange is not None else 0
    try:
        yield
    except FastPathError as error:
        if exchange is None:
            _refuse(None, str(error))
        elif exchange.turns.count == before:
            exchange.turns.refuse()
            _refuse(exchange, str(error))
        raise


@contextmanager
def launching(state: Tensor | None) -> Iterator[None]:
    """The launch of kernels with this state, in eager and in compiled code: what it refuses is published.

    Compiled code may pass a copy of the state, whose exchange is not known.
    """
    exchange = _LIVE.get(state.data_ptr()) if state is not None else None
    try:
        if state is None or exchange is None:
            yield
        else:
            with exchange.turns.launch(state.device):
                yield
    except FastPathError as error:
        _refuse(exchange, str(error))
        raise


def _refuse(exchange: Exchange | None, text: str) -> None:
    """Publish what this rank raised, and let no peer wait for it; `exchange` is None where it is not known."""
    store = _store()
    if exchange is not None and store is not None:
        _publish(store, exchange.name, exchange.turns.count, text)
        if _is_refused_by_all(store, exchange):
            return
    # This rank no longer makes the calls of the exchanges with the same ranks; of all where it is not known which.
    for live in list(_LIVE.values()):
        has_same_ranks = exchange is None or live.group is exchange.group
        if live.group is None or not has_same_ranks:
            continue
        is_other = live is not exchange
        if is_other and store is not None:
            _publish(store, live.name, live.turns.count + 1, text)
        live.close()


def _publish(store: RankStore, name: str, number: int, text: str) -> None:
    """Store the last refusal under the name of an exchange, and a mark under the number of the call."""
    store.put(f"{store.rank}/{name}", _Refusal(number=number, text=text).model_dump(mode="json"))
    store.put(f"{store.rank}/{name}/{number}", True)


def _is_refused_by_all(store: RankStore, exchange: Exchange) -> bool:
    """True when all ranks of its group refuse the call that this rank refused; waits `_ALIKE_S` for them."""
    if exchange.group is None:
        return False
    ranks = dist.get_process_group_ranks(exchange.group)
    call = f"{exchange.name}/{exchange.turns.count}"
    keys = {rank: f"{rank}/{call}" for rank in ranks}
    _, missing = store.gather(keys, bool, timeout_s=_ALIKE_S)
    return not missing


def _refusals(exchange: Exchange) -> dict[int, str]:
    """Rank of the job -> what it raised last, in a call that this rank did not refuse too; empty without a store."""
    store = _store() if exchange.group is not None else None
    if store is None:
        return {}
    found = {}
    for rank in dist.get_process_group_ranks(exchange.group):
        refusal = store.peek(f"{rank}/{exchange.name}", _Refusal)
        if refusal is not None and refusal.number not in exchange.turns.refused:
            found[rank] = refusal.text
    return found


def _store() -> RankStore | None:
    """None in a program of one process, and where the store cannot be reached: the FastPathError matters more."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        return RankStore.connect("tpcompile/fastpath/refused", rank=rank, world_size=world_size, timeout_s=_TIMEOUT_S)
    except (RuntimeError, ValueError):
        return None
