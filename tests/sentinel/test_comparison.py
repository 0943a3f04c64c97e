"""What a rank publishes about its calls while it runs and when it leaves, and what another rank makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.gate.threads import on_threads
from tpcompile.evidence.records.causes import Cause
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel import comparison as module
from tpcompile.sentinel.called import Called, called_by, difference, merged
from tpcompile.sentinel.comparison import Comparison
from tpcompile.sentinel.events import Compared
from tpcompile.sentinel.messages import Position
from tpcompile.sentinel.progress import Progress, Region
from tpcompile.sentinel.protocol import _parted
from tpcompile.sentinel.store_log import StoreLog


class Member:
    """One rank that calls one region with two compiled variants."""

    def __init__(self, rank: int, shared: dist.Store, number: int) -> None:
        self.rank = rank
        self.log = StoreLog(
            lambda: RankStore(shared, rank=rank, world_size=number), range(number), domain="tp", number=0
        )
        self.progress = Progress(lambda _: None)
        self.seen: list[Compared] = []
        self.comparison = Comparison(
            self.log, self.progress, on=lambda event: self.seen.append(event), has_parted=lambda: bool(self.cause)
        )
        self.region: Region = self.progress.region("f")
        self.region.num_collectives = 1
        for variant in ("0/0", "0/1"):
            self.progress.enter(self.region)
            position = Position(region="f", call=self.region.call, index=0)
            self.region.keep(position, variant)

    def calls(self, variant: str, times: int = 1) -> None:
        """Call the region; every call hits that variant."""
        for _ in range(times):
            self.progress.enter(self.region)
            self.region.ran.append((self.region.call, variant))

    @property
    def called(self) -> Called:
        return called_by(self.progress, is_over=False)

    @property
    def cause(self) -> Cause | None:
        """The finding of what it compared last."""
        found = _parted(self.seen[-1]) if self.seen else None
        return found and found.cause


@pytest.fixture
def shared() -> dist.Store:
    return dist.HashStore()


def members(shared: dist.Store, number: int) -> list[Member]:
    return [Member(rank, shared, number) for rank in range(number)]


def at_the_end(ranks: list[Member]) -> list[bool]:
    return on_threads(lambda rank: ranks[rank].comparison.at_the_end(), range(len(ranks)))


def test_differences_put_together_are_what_the_rank_called(shared: dist.Store) -> None:
    one = Member(0, shared, 1)
    heard: dict[str, Any] = {}
    said: dict[str, Any] = {}
    sizes = []
    for _ in range(200):
        one.calls("0/1", 3)
        now = one.called.model_dump(mode="json")
        news = difference(now, said)
        heard, said = merged(heard, news), now
        sizes.append(len(str(news)))
    assert max(sizes[60:]) < sizes[0], "what was published once is not published again"
    theirs, mine = Called.model_validate(heard), one.called
    kept = {call: theirs.ran["f"].variants[call] for call in mine.ran["f"].variants}
    assert kept == mine.ran["f"].variants
    assert mine.counted["f"].samples.items() <= theirs.counted["f"].samples.items()
    assert len(theirs.ran["f"].variants) <= 512


def test_a_table_of_a_peer_does_not_grow_without_end() -> None:
    table: dict[str, Any] = {}
    for batch in range(100):
        table = merged(table, {f"{batch}.{number}": 1 for number in range(1000)})
    assert len(table) == 4096


def test_the_neighbour_deletes_what_it_has_read_and_a_silent_one_costs_four_keys(shared: dist.Store) -> None:
    ranks = members(shared, 2)
    for _ in range(10):
        ranks[0].calls("0/1")
        ranks[0].comparison.with_the_next()
    assert shared.num_keys() == 4
    ranks[1].comparison.with_the_next()
    assert shared.num_keys() == 1, "its own"
    ranks[0].calls("0/1")
    ranks[0].comparison.with_the_next()
    ranks[1].calls("0/1")
    ranks[1].comparison.with_the_next()
    theirs = ranks[1].seen[-1].ran[0]["f"]
    assert theirs.variants == ranks[0].called.ran["f"].variants, "what was not published in between came with the next"


def test_nothing_is_published_while_no_region_is_called(shared: dist.Store) -> None:
    ranks = members(shared, 2)
    ranks[0].comparison.with_the_next()
    before = ranks[0].log.num_operations
    ranks[0].comparison.with_the_next()
    assert ranks[0].log.num_operations == before


def test_a_wrong_variant_is_found_by_the_neighbour_of_the_timer(shared: dist.Store) -> None:
    ranks = members(shared, 2)
    for rank in ranks:
        rank.calls("0/0" if rank.rank else "0/1")
        rank.calls("0/1", 3)
    for rank in ranks:
        rank.comparison.with_the_next()
    assert [rank.cause for rank in ranks] == [None, Cause.WRONG_VARIANT]


def test_a_tick_of_the_timer_does_not_take_back_that_a_rank_has_left(
    shared: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVING_S", 0.0)
    ranks = members(shared, 2)
    ranks[0].comparison.with_the_next()
    ranks[0].comparison.at_the_end()
    ranks[0].calls("0/1")
    ranks[0].comparison.with_the_next()
    assert ranks[1].log.called_on([0])[0].counted["f"].is_over
    assert ranks[1].log.more_of(0, 1) is None and ranks[1].log.more_of(0, 2) is None


def test_equal_ranks_that_leave_read_their_neighbours_alone(shared: dist.Store) -> None:
    ranks = members(shared, 8)
    assert at_the_end(ranks) == [False] * 8
    assert {len(rank.seen[-1].ran) for rank in ranks} <= {1, 2, 3}
    assert not any(rank.cause for rank in ranks)


def test_one_rank_reads_what_all_called_where_a_hash_differs_and_all_wait_for_it(
    shared: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVING_S", 30.0)
    ranks = members(shared, 8)
    for rank in ranks:
        rank.calls("0/0" if rank.rank == 5 else "0/1")
        rank.calls("0/1" if rank.rank == 5 else "0/0")
    is_found = at_the_end(ranks)
    judges = [rank for rank in ranks if len(rank.seen[-1].ran) == 8]
    assert len(judges) == 1 and judges[0].cause == Cause.WRONG_VARIANT
    assert is_found == [rank is not judges[0] for rank in ranks]


def test_ranks_that_called_different_often_are_no_finding(shared: dist.Store) -> None:
    ranks = members(shared, 4)
    ranks[2].calls("0/1", 2)
    assert at_the_end(ranks) == [False] * 4
    assert not any(rank.cause for rank in ranks)
