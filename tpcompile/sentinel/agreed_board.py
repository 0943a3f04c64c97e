"""Values that ranks said are equal <-> keys of the job's store, of which each rank has a few, whatever their number.

agreed/now/<rank>           how many values a rank has said, and some links of their chain, from time to time
agreed/over/<rank>          the same when it leaves, and agreed/newest/<rank> the last values themselves
agreed/values/<ask>/<rank>  the values that are asked for where links differ; asks: how often any were
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tpcompile.evidence.records.bounds import Number
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel.agreement import Links, Value

_NAME, _NOW, _OVER, _NEWEST, _ASKS = "agreed", "now", "over", "newest", "asks"
_Values = dict[Number, Value]


class Stores(Protocol):
    """Makes clients of the job's store for the calling thread."""

    @property
    def rank(self) -> int:
        """This rank."""

    def store(self, prefix: str, *, operations: int = 0) -> RankStore:
        """A client under that prefix, which counts those operations."""


class AgreedBoard:
    """The keys of one rank, and what it reads of the others."""

    def __init__(self, log: Stores) -> None:
        self._log = log

    def say_links(self, links: Links) -> None:
        """Publish how far this rank's values are, and links of their chain."""
        key = f"{_OVER if links.is_over else _NOW}/{self._log.rank}"
        self._log.store(_NAME, operations=1).put(key, links.model_dump(mode="json"))

    def links_on(self, ranks: Sequence[int], *, is_over: bool, wait_s: float = 0.0) -> dict[int, Links]:
        """The links that these ranks have published, from time to time or on leaving."""
        return self._gather(_OVER if is_over else _NOW, ranks, Links, timeout_s=wait_s)

    def keep_values(self, values: Mapping[int, Value]) -> None:
        """Publish the last values, before this rank leaves: the others may find that they differ."""
        self._log.store(_NAME, operations=1).put(f"{_NEWEST}/{self._log.rank}", _dumped(values))

    def new_ask(self) -> int:
        """Number of the next question for values, of any rank."""
        return self._log.store(_NAME, operations=1).count(_ASKS)

    def tell_values(self, ask: int, values: Mapping[int, Value]) -> None:
        """Answer a question for values."""
        self._log.store(_NAME, operations=1).put(f"values/{ask}/{self._log.rank}", _dumped(values))

    def values_told(self, ask: int, ranks: Sequence[int], *, timeout_s: float) -> dict[int, dict[int, Value]]:
        """The answers of these ranks."""
        return self._gather(f"values/{ask}", ranks, _Values, timeout_s=timeout_s)

    def values_kept(self, ranks: Sequence[int]) -> dict[int, dict[int, Value]]:
        """The last values of those of these ranks that have left."""
        return self._gather(_NEWEST, ranks, _Values, timeout_s=0.0)

    def _gather(self, name: str, ranks: Sequence[int], kind: Any, *, timeout_s: float) -> dict[int, Any]:
        store = self._log.store(_NAME, operations=len(ranks))
        return store.gather({rank: f"{name}/{rank}" for rank in ranks}, kind, timeout_s=timeout_s)[0]


def agreed_keys(store: RankStore, ranks: Iterable[int]) -> list[str]:
    """All keys that these ranks may have written."""
    asks = range(1, store.count(f"{_NAME}/{_ASKS}", 0) + 1)
    names = [_NOW, _OVER, _NEWEST, *(f"values/{ask}" for ask in asks)]
    return [f"{_NAME}/{_ASKS}", *(f"{_NAME}/{name}/{rank}" for name in names for rank in ranks)]


def _dumped(values: Mapping[int, Value]) -> dict[str, Any]:
    return {str(number): value.model_dump(mode="json") for number, value in values.items()}
