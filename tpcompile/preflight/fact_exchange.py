"""A fixed set of ranks that exchanges repeatedly -> one verdict each time, and the last state of every rank.

`Details` are the facts behind the hashes that ranks publish; the judge asks for them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Generic, TypeVar

import torch.distributed as dist

from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.text.ranks import exact_ranks, named_ranks
from tpcompile.ranks.exchange import Exchange, Fetch, Question, Side
from tpcompile.ranks.run_dir import agreed_run_dir
from tpcompile.ranks.store import RankStore
from tpcompile.report.verdict import ShownVerdict

_ROOT = "tpcompile/preflight"
_num_exchanges: Counter[str] = Counter()
"""Name -> exchanges of this process so far: ranks that call alike meet under equal numbers."""
_T = TypeVar("_T")

_ASKED = 2
"""Ranks asked at most for one hash: each that does not answer costs the timeout."""


class Details(Generic[_T]):
    """Facts of ranks, asked for once per hash: a rank with the same hash answers for one that is dead."""

    def __init__(self, fetch: Fetch, question: Question, shas: Mapping[int, str], kind: type[_T]) -> None:
        self.shas = shas
        """Rank -> its hash."""
        self._fetch, self._question, self._kind = fetch, question, kind
        self._known: dict[str, _T | None] = {}

    def of(self, ranks: Iterable[int]) -> ByRank[_T]:
        """Facts of these ranks; a rank is missing when no rank with its hash answers."""
        return ByRank({rank: rank for rank in ranks}).found(self._of)

    def _of(self, rank: int) -> _T | None:
        sha = self.shas[rank]
        if sha not in self._known:
            alike = [other for other, other_sha in self.shas.items() if other_sha == sha]
            self._known[sha] = None
            for asked in islice(dict.fromkeys([rank, *alike]), _ASKED):
                answer: _T | None = self._fetch(asked, self._question, self._kind)
                if answer is not None:
                    self._known[sha] = answer
                    break
        return self._known[sha]


class Exchanges:
    """Repeated exchanges among a fixed set of ranks; every rank makes it and calls it in the same order."""

    def __init__(self, name: str, *, ranks: Sequence[int], store: dist.Store | None, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = dist.get_rank(), tuple(sorted(ranks)), timeout_s
        if self.rank not in self.ranks:
            raise ConfigError(f"rank {self.rank} is not in the mesh ({named_ranks(self.ranks)})")
        self._name = f"{name} of ranks {exact_ranks(self.ranks)}"
        world_size = dist.get_world_size()
        if store is not None:
            self._root = RankStore(dist.PrefixStore(_ROOT, store), rank=self.rank, world_size=world_size)
        elif "MASTER_ADDR" in os.environ:
            self._root = RankStore.connect(_ROOT, rank=self.rank, world_size=world_size, timeout_s=timeout_s)
        else:
            raise ConfigError("MASTER_ADDR is not set, so there is no store to connect to; pass store=")

    def publish_state(self, doing: str) -> None:
        """Publish what this rank is doing, so that a verdict can name where it stopped."""
        with self._store_errors():
            self._root.put(f"seen/{self.rank}", f"{doing} for {self._name}, number {_num_exchanges[self._name]}")

    def last_seen(self, rank: int) -> str:
        """The last state that a rank published, in any exchange."""
        return str(self._root.peek(f"seen/{rank}", str) or "never: it did not enter a preflight check")

    def is_gone(self, rank: int) -> bool:
        """Always False: ranks publish their state here, not their process."""
        return False

    def verdict(self, side: Side) -> ShownVerdict:
        """Publish this rank's digest, then judge or answer until there is a verdict.

        Raises DivergenceError when the judge stops responding or the store cannot be reached.
        """
        self.publish_state("waiting")
        number = _num_exchanges[self._name]
        _num_exchanges[self._name] += 1
        with self._store_errors():
            store = self._root.under(f"{self._name}/{number}")
            verdict = Exchange(store, self.ranks, others=self, timeout_s=self.timeout_s).verdict(side)
        if verdict is None:
            raise DivergenceError(
                f"rank {self.rank} got no verdict of {self._name} within {self.timeout_s:g} s; the judging rank "
                "stopped responding"
            )
        with suppress(dist.DistError):  # the verdict is known; the rank that serves the store may have exited
            self._root.put(f"seen/{self.rank}", f"done with {self._name}, number {number}")
        return ShownVerdict.shown(
            verdict,
            is_reporter=self.rank == self.ranks[0],
            command="preflight",
            choose_run_dir=lambda: agreed_run_dir(store, "preflight", None),
        )

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise DivergenceError(f"rank {self.rank} lost the store: the process that serves it ended") from error
