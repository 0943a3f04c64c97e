"""This rank's record -> one verdict that all ranks hold: hashes first, details only where hashes differ."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from loguru import logger

from tpcompile.dist.store import RankStore
from tpcompile.evidence.digest import digest_rank, environment_items, layer_items
from tpcompile.evidence.records import Check, Item, Layer, RankDigest, RankRecord, Verdict
from tpcompile.evidence.verdict import Absent, Rules, conclude

_DETAIL_TIMEOUT_S = 60.0


class Seen(Protocol):
    """What is known of the other ranks."""

    def last_seen(self, rank: int) -> str:
        """What that rank last said."""
        ...

    def is_gone(self, rank: int) -> bool:
        """True when that rank is known to be dead."""
        ...


class Exchange:
    """One exchange of digests among `members`, by default all ranks.

    The lowest rank that reported judges; the others answer its questions.
    """

    def __init__(self, store: RankStore, rules: Rules, *, board: Seen, members: Sequence[int] | None = None) -> None:
        self._store, self._rules, self._board = store, rules, board
        self._members = tuple(range(store.world_size)) if members is None else tuple(sorted(members))

    def verdict(self, record: RankRecord, *, timeout_s: float, problems: Sequence[Check] = ()) -> Verdict | None:
        """Publish this rank's digest and return the verdict; None when the judge fell silent.

        A rank that does not report within `timeout_s` is named as missing in the verdict.
        """
        digest = digest_rank(record)
        self._store.put(f"digest/{record.rank}", digest.model_dump(mode="json"))
        keys = {rank: f"digest/{rank}" for rank in self._members}
        first = self._members[0]
        if record.rank != first:
            # The first rank judges unless it is gone: without its digest, the lowest rank that reported takes over.
            keys = {rank: key for rank, key in keys.items() if rank <= record.rank}
        stop_at = "" if record.rank == first else f"digest/{first}"
        found, _ = self._store.gather(keys, timeout_s=timeout_s, stop_at=stop_at, gone=self._board.is_gone)
        # Ranks can see different things at one instant, and two judges would wait for each other's answers.
        is_lowest = min(found) == record.rank
        if is_lowest and self._store.put_first("judge", record.rank) == record.rank:
            return self._judge(record, timeout_s=timeout_s, problems=problems)
        return self._answer(record, timeout_s=timeout_s)

    def _judge(self, record: RankRecord, *, timeout_s: float, problems: Sequence[Check]) -> Verdict:
        keys = {rank: f"digest/{rank}" for rank in self._members}
        found, late = self._store.gather(keys, timeout_s=timeout_s, gone=self._board.is_gone)
        digests = [RankDigest.model_validate(value) for _, value in sorted(found.items())]
        verdict = conclude(
            self._rules,
            digests,
            self._fetcher(record),
            world_size=self._store.world_size,
            absent=[Absent(rank, self._board.last_seen(rank)) for rank in late],
            problems=problems,
        )
        self._store.put("verdict", verdict.model_dump(mode="json"))
        return verdict

    def _fetcher(self, record: RankRecord) -> Callable[[int, int, Layer, str], Sequence[Item]]:
        asked: Counter[int] = Counter()

        def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
            if rank == record.rank:
                return _items(record, index, layer, part)
            asked[rank] += 1
            number = f"{rank}/{asked[rank]}"
            self._store.put(f"ask/{number}", {"index": index, "layer": layer, "part": part})
            answer = self._store.get(f"answer/{number}", timeout_s=_DETAIL_TIMEOUT_S)
            if answer is None:
                logger.warning("rank {} did not send the details of its {} layer", rank, layer)
                return ()
            return [Item.model_validate(item) for item in answer]

        return fetch

    def _answer(self, record: RankRecord, *, timeout_s: float) -> Verdict | None:
        """Answer the judge's questions until there is a verdict."""
        wait_s = timeout_s + _DETAIL_TIMEOUT_S
        for number in itertools.count(1):
            key = f"{record.rank}/{number}"
            found, _ = self._store.gather({0: "verdict"}, timeout_s=wait_s, stop_at=f"ask/{key}")
            if found:
                return Verdict.model_validate(found[0])
            ask = self._store.peek(f"ask/{key}")
            if ask is None:
                break
            items = _items(record, ask["index"], Layer(ask["layer"]), ask["part"])
            self._store.put(f"answer/{key}", [item.model_dump(mode="json") for item in items])
        return None


def _items(record: RankRecord, index: int, layer: Layer, part: str) -> Sequence[Item]:
    return environment_items(record) if index < 0 else layer_items(record.compiles[index], layer, part)
