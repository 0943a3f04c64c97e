"""This rank's digest -> one verdict that all participating ranks hold, through the store; one rank judges.

The lowest rank that reported judges. Details travel only when it asks for them, and it asks only where hashes differ.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from tpcompile.dist.store import RankStore
from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.text.ranks import ranks_text

_DETAIL_TIMEOUT_S = 60.0
_ROOT = "tpcompile/parity"
_num_exchanges: Counter[str] = Counter()

Question = dict[str, Any]


class Fetch(Protocol):
    """Asks one rank for details."""

    def __call__(self, rank: int, question: Question) -> Any | None:
        """Its answer; None when it did not come in time."""
        ...


@dataclass(frozen=True)
class Side:
    """What a rank brings to an exchange."""

    digest: Any
    """JSON that every rank publishes: hashes, small."""
    answer: Callable[[Question], Any]
    """Question of the judge -> details, JSON."""
    judge: Callable[[dict[int, Any], dict[int, str], Fetch], Verdict]
    """(digests by rank, last-seen text of every absent rank, fetch) -> verdict."""


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

    def verdict(self, side: Side) -> Verdict:
        """Publish, then judge or answer until there is a verdict.

        Raises DivergenceError when the judge falls silent or the store is gone.
        """
        self.say("waiting")
        number = _num_exchanges[self._name]
        _num_exchanges[self._name] += 1
        with self._store_errors():
            verdict = _Exchange(self, self._root.under(f"{self._name}/{number}"), side).verdict()
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


class _Exchange:
    """One exchange: either the judge's part or an answering rank's."""

    def __init__(self, meeting: Meeting, store: RankStore, side: Side) -> None:
        self._meeting, self._store, self._side = meeting, store, side
        self.rank, self.timeout_s = meeting.rank, meeting.timeout_s
        self._keys = {rank: f"digest/{rank}" for rank in meeting.ranks}

    def verdict(self) -> Verdict | None:
        deadline = time.monotonic() + self.timeout_s
        self._store.put(f"digest/{self.rank}", self._side.digest)
        first = min(self._keys)
        # The first rank judges unless it is gone: without its digest, the lowest rank that reported takes over.
        keys = self._keys if self.rank == first else {r: key for r, key in self._keys.items() if r <= self.rank}
        stop_at = "" if self.rank == first else f"digest/{first}"
        found, _ = self._store.gather(keys, timeout_s=self.timeout_s, stop_at=stop_at)
        # Ranks can see different things at one instant, and two judges would wait for each other's answers.
        is_lowest = min(found) == self.rank
        if is_lowest and self._store.put_first("judge", self.rank) == self.rank:
            return self._judge(wait_s=max(deadline - time.monotonic(), 0.0))
        return self._answer()

    def _judge(self, *, wait_s: float) -> Verdict:
        found, late = self._store.gather(self._keys, timeout_s=wait_s)
        absent = {rank: self._meeting.last_seen(rank) for rank in late}
        verdict = self._side.judge(found, absent, self._fetcher())
        self._store.put("verdict", verdict.model_dump(mode="json"))
        return verdict

    def _fetcher(self) -> Fetch:
        asked: Counter[int] = Counter()
        silent: set[int] = set()
        """Ranks that left a question unanswered: they are not waited for again."""

        def fetch(rank: int, question: Question) -> Any | None:
            if rank == self.rank:
                return self._side.answer(question)
            if rank in silent:
                return None
            asked[rank] += 1
            self._store.put(f"ask/{rank}/{asked[rank]}", question)
            answer = self._store.get(f"answer/{rank}/{asked[rank]}", timeout_s=_DETAIL_TIMEOUT_S)
            if answer is None:
                silent.add(rank)
            return answer

        return fetch

    def _answer(self) -> Verdict | None:
        wait_s = self.timeout_s + _DETAIL_TIMEOUT_S
        for number in itertools.count(1):
            key = f"{self.rank}/{number}"
            found, _ = self._store.gather({0: "verdict"}, timeout_s=wait_s, stop_at=f"ask/{key}")
            if found:
                return Verdict.model_validate(found[0])
            question = self._store.peek(f"ask/{key}")
            if question is None:
                break
            self._store.put(f"answer/{key}", self._side.answer(question))
        return None


def _connect(store: dist.Store | None, *, rank: int, timeout_s: float) -> RankStore:
    world_size = dist.get_world_size()
    if store is not None:
        return RankStore(dist.PrefixStore(_ROOT, store), rank=rank, world_size=world_size)
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError("MASTER_ADDR is not set, so no store can be found there; pass store=")
    return RankStore.connect(_ROOT, rank=rank, world_size=world_size, timeout_s=timeout_s)
