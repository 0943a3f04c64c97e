"""Ranks as threads over one in-memory store: what the gate does between ranks, without processes or compiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from tpcompile.ranks.store import RankStore


class CountingStore(RankStore):
    """A rank's store that remembers the keys it wrote."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        super().__init__(store, rank=rank, world_size=world_size)
        self.written: list[str] = []
        self.claimed: list[str] = []
        """Keys that it wrote if no rank had."""
        self.sizes: Counter[str] = Counter()
        """Bytes by the first part of the key."""

    def put(self, key: str, value: Any) -> None:
        """Publish and note the key."""
        self.written.append(key)
        self.sizes[key.partition("/")[0]] += len(json.dumps(value))
        super().put(key, value)

    def put_first(self, key: str, value: Any, kind: Any) -> Any | None:
        """Publish unless the key has a value, and note the key."""
        self.claimed.append(key)
        self.sizes[key.partition("/")[0]] += len(json.dumps(value))
        return super().put_first(key, value, kind)


def stores(world_size: int) -> list[CountingStore]:
    """One client per rank of one new store."""
    shared = dist.HashStore()
    return [CountingStore(shared, rank=rank, world_size=world_size) for rank in range(world_size)]


def on_threads(fn: Callable[[int], Any], ranks: range | list[int]) -> list[Any]:
    """`fn(rank)` on a thread for each rank, all at once; an exception is the result of its rank."""

    def call(rank: int) -> Any:
        try:
            return fn(rank)
        except Exception as error:  # the result of its rank, which the test looks at
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))
