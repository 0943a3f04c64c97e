"""The first settled value wins: on all ranks alike, with the ranks that did not come, whichever rank decides."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.gate.threads import on_threads, stores
from tpcompile.ranks.agree import agree
from tpcompile.ranks.store import RankStore

WORLD_SIZE = 4
Decide = Callable[[dict[int, int], dict[int, str]], Any]


def agreed(
    store: RankStore,
    *,
    decide: Decide | None = None,
    timeout_s: float = 60.0,
    gone: Callable[[int], bool] | None = None,
) -> Any:
    """What a rank that brings ten times its number returns: by default which rank decided, and from what."""

    def describe(brought: dict[int, int], absent: dict[int, str]) -> Any:
        return [store.rank, list(brought.values()), list(absent)]

    return agree(
        store,
        range(WORLD_SIZE),
        10 * store.rank,
        kind=int,
        decide=decide or describe,
        result=list[Any],
        timeout_s=timeout_s,
        gone=gone or (lambda rank: False),
    )


def test_the_lowest_rank_decides_for_all_from_what_all_brought() -> None:
    clients = stores(WORLD_SIZE)
    found = on_threads(lambda rank: agreed(clients[rank]), range(WORLD_SIZE))
    assert found == [[0, [0, 10, 20, 30], []]] * WORLD_SIZE


def test_only_the_lowest_rank_looks_at_what_the_others_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost must grow with the ranks, not with their square."""
    read: list[tuple[int, str]] = []
    peek = RankStore.peek

    def noted(self: RankStore, key: str, kind: Any, **options: Any) -> Any:
        read.append((self.rank, key))
        return peek(self, key, kind, **options)

    monkeypatch.setattr(RankStore, "peek", noted)
    clients = stores(WORLD_SIZE)
    on_threads(lambda rank: agreed(clients[rank]), range(WORLD_SIZE))
    assert {rank for rank, key in read if key.startswith("brought/")} == {0}


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_come_is_absent_on_all_and_takes_the_same_when_it_comes_late(missing: int) -> None:
    clients = stores(WORLD_SIZE)
    here = [rank for rank in range(WORLD_SIZE) if rank != missing]
    found = on_threads(lambda rank: agreed(clients[rank], timeout_s=0.3), here)
    late = agreed(clients[missing])
    assert len({(one[0], tuple(one[2])) for one in [*found, late]}) == 1
    assert late[0] in here and late[2] == [missing]


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    clients = stores(WORLD_SIZE)
    began_s = time.monotonic()
    found = on_threads(lambda rank: agreed(clients[rank], gone=lambda other: other == 0), [1, 2, 3])
    assert all(one[2] == [0] for one in found) and time.monotonic() - began_s < 30


def test_what_is_no_such_value_counts_as_not_brought_with_the_reason_and_a_settled_one_is_replaced() -> None:
    clients = stores(2)
    clients[1].put("brought/1", "ten")
    clients[1].put("settled", {"not": "this"})
    absent: dict[int, str] = {}

    def decide(brought: dict[int, int], missing: dict[int, str]) -> list[int]:
        absent.update(missing)
        return sorted(brought)

    assert agree(clients[0], [0, 1], 0, kind=int, decide=decide, result=list[int], timeout_s=0.3) == [0]
    assert re.match("Input .*valid integer", absent[1])
    assert agreed(clients[1]) == [0]
