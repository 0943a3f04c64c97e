"""A fixed set of ranks that exchanges again and again -> one verdict each time, and what every rank last did.

`Details` is what a judge asks for: what stands behind the hashes that ranks sent.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from tpcompile.ranks.exchange import Exchange, Fetch, Question, Side
from tpcompile.ranks.store import RankStore
from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.evidence.byrank import ByRank
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.text.ranks import ranks_text

_ROOT = "tpcompile/parity"
_num_exchanges: Counter[str] = Counter()
_T = TypeVar("_T")


_ASKED = 2
"""Ranks of one hash that are asked at most: each that is silent costs the timeout."""


class Details(Generic[_T]):
    """What ranks say in full, asked for once per hash: whoever has the same hash says the same, also for the dead."""

    def __init__(self, fetch: Fetch, question: Question, shas: Mapping[int, str], parse: Callable[[Any], _T]) -> None:
        self.shas = shas
        """By rank."""
        self._fetch, self._question, self._parse = fetch, question, parse
        self._known: dict[str, _T | None] = {}

    def of(self, ranks: Iterable[int]) -> ByRank[_T]:
        """What these ranks say; a rank is missing when nobody with its hash answers."""
        return ByRank({rank: rank for rank in ranks}).found(self._of)

    def _of(self, rank: int) -> _T | None:
        sha = self.shas[rank]
        if sha not in self._known:
            alike = [other for other, said in self.shas.items() if said == sha]
            self._known[sha] = self._first_answer(dict.fromkeys([rank, *alike]))
        return self._known[sha]

    def _first_answer(self, ranks: Iterable[int]) -> _T | None:
        for rank in islice(ranks, _ASKED):
            answer = self._fetch(rank, self._question)
            if answer is not None:
                return self._parse(answer)
        return None


class Meeting:
    """The place where a fixed set of ranks exchanges, again and again; every rank makes and uses it alike."""

    def __init__(self, name: str, *, ranks: Sequence[int], store: dist.Store | None, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = dist.get_rank(), tuple(sorted(ranks)), timeout_s
        if self.rank not in self.ranks:
            raise ConfigError(f"rank {self.rank} is not among the ranks {ranks_text(self.ranks)} of the mesh")
        self._name = f"{name} of rank {ranks_text(self.ranks)}"
        self._root = _connect(store, rank=self.rank, timeout_s=timeout_s)

    def say(self, doing: str) -> None:
        """Leave word of what this rank does, for the verdict in case it never gets further."""
        with self._store_errors():
            self._root.put(f"seen/{self.rank}", f"{doing} for {self._name}, number {_num_exchanges[self._name]}")

    def last_seen(self, rank: int) -> str:
        """What a rank last said, in any exchange."""
        return str(self._root.peek(f"seen/{rank}") or "never: it entered no parity check")

    def is_gone(self, rank: int) -> bool:
        """Nobody knows: ranks say what they do, not in which process."""
        return False

    def verdict(self, side: Side) -> Verdict:
        """Publish, then judge or answer until there is a verdict.

        Raises DivergenceError when the judge falls silent or the store is gone.
        """
        self.say("waiting")
        number = _num_exchanges[self._name]
        _num_exchanges[self._name] += 1
        with self._store_errors():
            store = self._root.under(f"{self._name}/{number}")
            verdict = Exchange(store, self.ranks, others=self, timeout_s=self.timeout_s).verdict(side)
        if verdict is None:
            raise DivergenceError(
                f"rank {self.rank} got no verdict of {self._name} within {self.timeout_s:g} s; the judging rank fell "
                "silent"
            )
        with suppress(dist.DistError):  # the verdict is here; others may be gone already
            self._root.put(f"seen/{self.rank}", f"done with {self._name}, number {number}")
        return verdict

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise DivergenceError(f"rank {self.rank} lost the store: the process that serves it ended") from error


def _connect(store: dist.Store | None, *, rank: int, timeout_s: float) -> RankStore:
    world_size = dist.get_world_size()
    if store is not None:
        return RankStore(dist.PrefixStore(_ROOT, store), rank=rank, world_size=world_size)
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError("MASTER_ADDR is not set, so no store can be found there; pass store=")
    return RankStore.connect(_ROOT, rank=rank, world_size=world_size, timeout_s=timeout_s)
