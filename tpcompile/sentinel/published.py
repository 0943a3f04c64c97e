"""Ranks -> what they have published under their numbers, and that of the ranks that they wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpcompile.ranks.store import RankStore
from tpcompile.sentinel.deadlock import Seen
from tpcompile.sentinel.messages import RankState


def published(store: RankStore, ranks: Iterable[int], kind: Any, *, timeout_s: float = 0.0) -> dict[int, Any]:
    """What these ranks have written under their rank as key."""
    found, _ = store.gather({rank: str(rank) for rank in ranks}, kind, timeout_s=timeout_s)
    return found


def waited_for(states: Iterable[RankState]) -> set[int]:
    """The ranks that these ranks wait for."""
    return set[int]().union(*(state.waits_with for state in states))


def reachable(board: RankStore, wanted: set[int], known: set[int]) -> dict[int, Seen]:
    """What `wanted` ranks have published, and those that they wait for; not the `known` ones."""
    found: dict[int, Seen] = {}
    while wanted:
        news = published(board, wanted, Seen)
        found |= news
        known = known | wanted
        wanted = waited_for(seen.state for seen in news.values()) - known
    return found
