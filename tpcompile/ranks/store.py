"""JSON between ranks through the c10d store: no collective, no pickle, never without a timeout.

What a peer wrote is read as a type that the caller names. A value that is not of that type counts as not written, which
is logged once with its key: a rank that sends nothing is a finding already.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tpcompile.evidence.records.bounds import read
from tpcompile.ranks.packed import compressed, expanded
from tpcompile.sink import Sink
from tpcompile.torch_api.c10d import own_client_of_default_store

_POLL_S = 0.02
"""Pause between looks at the store, each of which is a round trip for every rank that is missing."""
_NO_VALUE = "?"
"""No JSON. A compare_set that expects it writes nothing, and returns it where there is no value, in one step: a rank
that asks whether there is one, and then for it, waits for the store's timeout where a peer deletes it in between, or
gets an empty one."""
_MAX_LOGGED = 20
"""Values of one client that are logged as not valid."""
_logger = Sink("store")


class Line:
    """The line of this process to the job's store: since when nothing has come over it, and whether it is given up.

    torch's client waits for a server on an unreachable node until TCP gives up, a quarter of an hour: threads that wait
    cannot be woken, so a different one looks here.
    """

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        """Thread -> when it asked what has not been answered, on the monotonic clock."""
        self._failed_at: float | None = None
        """When the first was asked of those that failed, with nothing asked after it that was answered."""
        self.why_given_up = ""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around what the store must answer at once. Raises RuntimeError where it is given up."""
        self.check()
        thread, at_s = threading.get_ident(), time.monotonic()
        self._asked[thread] = at_s
        try:
            yield
        except RuntimeError:
            self._failed_at = min(at_s, self._failed_at or at_s)
            raise
        else:
            # The answer to a question that was asked before the one that failed is no sign that the store is back.
            if self._failed_at is not None and at_s > self._failed_at:
                self._failed_at = None
        finally:
            del self._asked[thread]

    def check(self) -> None:
        """Raises RuntimeError where the line is given up."""
        if self.why_given_up:
            raise RuntimeError(self.why_given_up)

    def silent_since(self) -> float | None:
        """When this process asked what the store has not answered, on the monotonic clock; None where it answers."""
        asked = [*self._asked.copy().values(), *([] if self._failed_at is None else [self._failed_at])]
        return min(asked, default=None)

    def is_asking(self, thread: int) -> bool:
        """True for a thread that waits for an answer."""
        return thread in self._asked

    def give_up(self, why: str) -> None:
        """Have every later question fail at once: this process ends, and says what it knows by itself."""
        self.why_given_up = why


LINE = Line()


class Budget:
    """Bytes that may still be read of what peers wrote."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = self._left_bytes = size_bytes

    def take(self, size_bytes: int) -> None:
        """Raises ValueError when less is left."""
        if size_bytes > self._left_bytes:
            raise ValueError(f"{size_bytes} bytes, and {self._left_bytes} of {self._size_bytes} are left for all ranks")
        self._left_bytes -= size_bytes


class RankStore:
    """A rank's own client of the job's store, under one prefix.

    Own client: a blocking wait on a shared client would stop torch's own store traffic.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self.rank, self.world_size = rank, world_size
        self._refused: dict[str, str] = {}

    @classmethod
    def connect(cls, prefix: str, *, rank: int, world_size: int, timeout_s: float = 60.0) -> RankStore:
        """Connect to the store torchrun (or rank 0) serves at MASTER_ADDR:MASTER_PORT.

        Without these variables, as with `init_process_group(store=...)`, to the store of the default group. Raises
        RuntimeError when no store is served there.
        """
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            with LINE.asking():
                client: dist.Store = dist.TCPStore(
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                    is_master=False,
                    timeout=timedelta(seconds=timeout_s),
                )
        else:
            client = own_client_of_default_store()
        # torchrun's store may outlive a restart, with the keys of the previous attempt. On one node only: each node has
        # its own restart count (pytorch#108158), and ranks under different prefixes would never see each other's keys.
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        if is_one_node and count != "0":
            prefix = f"attempt_{count}/{prefix}"
        return cls(dist.PrefixStore(prefix, client), rank=rank, world_size=world_size)

    @classmethod
    def alone(cls) -> RankStore:
        """The store of a program without other ranks."""
        return cls(dist.HashStore(), rank=0, world_size=1)

    @classmethod
    def of_job(cls, prefix: str, store: dist.Store | None = None) -> RankStore:
        """The place of this rank in the default group, through `store`, or else by `connect`."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if store is None:
            return cls.connect(prefix, rank=rank, world_size=world_size)
        return cls(dist.PrefixStore(prefix, store), rank=rank, world_size=world_size)

    def under(self, prefix: str) -> RankStore:
        """The same client under a further prefix."""
        return RankStore(dist.PrefixStore(prefix, self._store), rank=self.rank, world_size=self.world_size)

    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value."""
        with LINE.asking():
            self._store.set(key, _text(value))

    def put_first(self, key: str, value: Any, kind: Any) -> Any | None:
        """Publish unless the key has a value of `kind`; return the value that the key then has.

        A value that is not of that kind is replaced, by one rank. None when the key still has one then.
        """
        text = _text(value)
        with LINE.asking():
            raw = self._store.compare_set(key, "", text)
        found = self._read(key, raw, kind)
        if found is None:
            with LINE.asking():
                raw = self._store.compare_set(key, raw, text)
            found = self._read(key, raw, kind)
        return found

    def count(self, key: str, by: int = 1) -> int:
        """Add to a counter shared by all ranks; return the new total."""
        with LINE.asking():
            return int(self._store.add(key, by))

    def delete(self, *keys: str) -> None:
        """Remove these keys, as far as they exist."""
        with LINE.asking():
            for key in keys:
                self._store.delete_key(key)

    def wait(self, key: str, *, timeout_s: float) -> bool:
        """Block, without polling, until a rank publishes `key`; False when `timeout_s` passed first.

        Raises RuntimeError when the store cannot be reached.
        """
        LINE.check()
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))  # 0 is no limit
        except dist.DistStoreError:
            return False
        return True

    def has(self, key: str) -> bool:
        """True when there is a value at `key`. Does not block."""
        with LINE.asking():
            return bool(self._store.check([key]))

    def peek(self, key: str, kind: Any, *, sender: int | None = None, budget: Budget | None = None) -> Any | None:
        """The value at `key`, or None when there is none of `kind` yet. Does not block.

        A record with a rank must have that of the `sender`, if one is given. What exceeds a `budget` is not valid.
        """
        with LINE.asking():
            raw = self._store.compare_set(key, _NO_VALUE, _NO_VALUE)
        return None if raw == _NO_VALUE.encode() else self._read(key, raw, kind, sender, budget)

    def get(self, key: str, kind: Any, *, timeout_s: float) -> Any | None:
        """The value at `key`, waiting up to `timeout_s`; None when it did not arrive, or is not of `kind`."""
        return self._gather({0: key}, lambda _: self.peek(key, kind), timeout_s=timeout_s)[0].get(0)

    def why_refused(self, key: str) -> str:
        """What is wrong with the value at `key`, as this client last read it; empty for a valid one, or none."""
        return self._refused.get(key, "")

    def _read(
        self, key: str, raw: bytes, kind: Any, sender: int | None = None, budget: Budget | None = None
    ) -> Any | None:
        try:
            text = expanded(raw)
            if budget is not None:
                budget.take(len(text))
            found = read(text, kind, world_size=self.world_size, sender=sender)
        except ValueError as error:
            if key not in self._refused and len(self._refused) < _MAX_LOGGED:
                _logger.warning(
                    "rank {} ignores what the store has at {}, which is not valid: {}", self.rank, key, error
                )
            self._refused[key] = str(error)
            return None
        self._refused.pop(key, None)
        return found

    def gather(
        self,
        keys: dict[int, str],
        kind: Any,
        *,
        timeout_s: float,
        stop_at: str = "",
        gone: Callable[[int], bool] = lambda rank: False,
        budget: Budget | None = None,
    ) -> tuple[dict[int, Any], tuple[int, ...]]:
        """Values by rank, and the ranks whose value did not arrive in time, or is not of `kind`.

        `keys` maps rank -> key. Returns early when the key `stop_at` appears, or when every missing rank is `gone` or
        has sent something else.
        """

        def look(rank: int) -> Any | None:
            return self.peek(keys[rank], kind, sender=rank, budget=budget)

        return self._gather(keys, look, timeout_s=timeout_s, stop_at=stop_at, gone=gone)

    def _gather(
        self,
        keys: dict[int, str],
        look: Callable[[int], Any | None],
        *,
        timeout_s: float,
        stop_at: str = "",
        gone: Callable[[int], bool] = lambda rank: False,
    ) -> tuple[dict[int, Any], tuple[int, ...]]:
        found: dict[int, Any] = {}
        awaited = sorted(keys, reverse=True)
        deadline = time.monotonic() + timeout_s
        while awaited:
            # One look at a time: the other missing ranks are looked at when this one has come.
            rank = awaited[-1]
            value = look(rank)
            if value is not None:
                found[rank] = value
            elif not (self.why_refused(keys[rank]) or gone(rank)):
                is_stopped = stop_at != "" and self.has(stop_at)
                if is_stopped or time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
                continue
            awaited.pop()
        # A rank can publish its value after the look at its key and before `stop_at` or its end: look again.
        for rank in sorted(keys.keys() - found.keys()):
            value = look(rank)
            if value is not None:
                found[rank] = value
        return found, tuple(sorted(keys.keys() - found.keys()))

    def wait_for_ranks(self, name: str, *, timeout_s: float, ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Publish that this rank is at `name` and wait for `ranks`; return those that did not arrive."""
        self.put(f"{name}/{self.rank}", True)
        others = range(self.world_size) if ranks is None else ranks
        return self.gather({r: f"{name}/{r}" for r in others}, bool, timeout_s=timeout_s)[1]

    def leave_together(self, *, timeout_s: float) -> None:
        """Publish that this rank no longer needs the store; rank 0 waits until every rank has.

        Without a launcher, the store is served by rank 0's process and ends with it.
        """
        self.put(f"left/{self.rank}", True)
        if self.rank == 0:
            self.gather({rank: f"left/{rank}" for rank in range(self.world_size)}, bool, timeout_s=timeout_s)


def _text(value: Any) -> str:
    return compressed(json.dumps(value, sort_keys=True))
