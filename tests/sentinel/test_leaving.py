"""Ranks that leave: who ends together shares an entry of the log, and nothing stays in the store."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from tests.gate.threads import on_threads
from tests.ranks.messages import STATE
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel import store_log
from tpcompile.sentinel.events import Asked, Event, PeersLeft
from tpcompile.sentinel.left_ranks import LeftRanks
from tpcompile.sentinel.listener import Listener
from tpcompile.sentinel.log_entries import Ask
from tpcompile.sentinel.messages import FINISHED, Announcement, CompilePost, Position, RankState
from tpcompile.sentinel.store_log import StoreLog


class Member:
    """One rank: its log, its listener, and what that has heard."""

    def __init__(self, rank: int, shared: dist.Store, number: int) -> None:
        self.log = StoreLog(
            lambda: RankStore(shared, rank=rank, world_size=number), range(number), domain="tp", number=0
        )
        self.rank, self.heard = rank, list[Event]()
        self.listener = Listener(self.log, self.heard.append)
        self.listener.start()

    def leave(self, ended: str = FINISHED) -> bool:
        """Leave; True when the listener has ended."""
        state = STATE.model_copy(update={"rank": self.rank, "ended": ended})
        self.log.leave(state, has_heard=self.listener.has_ended)
        has_ended = self.listener.has_ended(20.0)
        self.log.forget()
        return has_ended

    @property
    def left(self) -> list[tuple[int, ...]]:
        """The ranks of each entry on ranks that left."""
        return [tuple(event.states) for event in self.heard if isinstance(event, PeersLeft)]


def post(rank: int) -> CompilePost:
    return CompilePost(rank=rank, frame="f", program="p", collectives="c", lowered="", num_collectives=1)


@pytest.fixture
def shared() -> dist.Store:
    return dist.HashStore()


def members(shared: dist.Store, number: int) -> list[Member]:
    return [Member(rank, shared, number) for rank in range(number)]


def test_ranks_that_finish_together_read_one_entry_each(shared: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_log, "_TOGETHER_S", 20.0)
    ranks = members(shared, 16)
    assert all(on_threads(lambda rank: ranks[rank].leave(), range(16)))
    assert [one.left for one in ranks] == [[tuple(range(16))]] * 16


def test_nothing_is_left_in_the_store_when_all_have_left(shared: dist.Store) -> None:
    ranks = members(shared, 4)
    assert all(on_threads(lambda rank: ranks[rank].leave(), range(4)))
    assert shared.num_keys() == 0


def test_entries_that_all_ranks_have_heard_are_deleted_while_the_job_runs(shared: dist.Store) -> None:
    ranks = members(shared, 2)
    for number in range(200):
        ranks[number % 2].log.append(Ask, number=number)
    for _ in range(500):
        if min(len(rank.heard) for rank in ranks) == 200 and shared.num_keys() < 40:
            break
        time.sleep(0.02)
    assert shared.num_keys() < 40, "one batch that is not full, and the counters"
    assert [event.number for event in ranks[0].heard if isinstance(event, Asked)] == [*range(200)]
    assert all(on_threads(lambda rank: ranks[rank].leave(), range(2)))
    assert shared.num_keys() == 0


def test_entries_that_one_rank_has_not_heard_are_kept_for_it(shared: dist.Store) -> None:
    late = StoreLog(lambda: RankStore(shared, rank=1, world_size=2), range(2), domain="tp", number=1)
    early = StoreLog(lambda: RankStore(shared, rank=0, world_size=2), range(2), domain="tp", number=1)
    for number in range(100):
        early.append(Ask, number=number)
    heard = early.entries()
    assert [next(heard) for _ in range(100)]
    numbers = [entry.number for _, entry in zip(range(100), late.entries(), strict=False) if isinstance(entry, Ask)]
    assert numbers == [*range(100)]


def test_nothing_of_a_position_is_left_when_all_ranks_have_compiled_the_same_there(shared: dist.Store) -> None:
    ranks = members(shared, 2)
    position = Position(region="f", call=1, index=0)
    for rank in ranks:
        rank.log.announce(Announcement(rank=rank.rank, position=position, compile_id="0/0"))
        is_last, is_equal = rank.log.post(position, post(rank.rank))
    assert (is_last, is_equal) == (True, True)
    assert shared.num_keys() > 0
    ranks[1].log.settle(position)
    assert all(on_threads(lambda rank: ranks[rank].leave(), range(2)))
    assert shared.num_keys() == 0


def test_a_job_that_waits_again_and_again_keeps_the_last_answers_alone(shared: dist.Store) -> None:
    ranks = members(shared, 2)
    most = 0
    for ask in range(1, 101):
        ranks[0].log.ask([], timeout_s=0.0)
        for rank in ranks:
            rank.log.answer(ask, STATE.model_copy(update={"rank": rank.rank, "issued": (), "since_s": float(ask)}))
        assert ranks[0].log.answers(ask, [0, 1], timeout_s=0.0)[1].since_s == ask
        earlier = ranks[1].log.answers(ask - 3, [0], timeout_s=0.0)
        assert bool(earlier) == (ask > 3)  # whoever asked before may not have read it yet
        most = max(most, shared.num_keys())
    assert most < 160  # 300 without an end; the log has 64 at most, and as many that are being deleted
    assert all(on_threads(lambda rank: ranks[rank].leave(), range(2)))
    assert shared.num_keys() == 0


def test_what_ranks_published_for_all_domains_is_deleted_by_the_last_of_all(shared: dist.Store) -> None:
    logs = [
        StoreLog(lambda r=rank: RankStore(shared, rank=r, world_size=2), [rank], domain=f"tp {rank}", number=0)
        for rank in range(2)
    ]
    for log in logs:
        log.say_here(black_box="")
        log.keep_flow(Flow())
    assert len({log.run_dir(None) for log in logs}) == 1  # of all domains
    logs[0].forget()
    assert logs[1].kept_flow(0) is not None
    logs[1].forget()
    assert shared.num_keys() == 0


def test_a_rank_that_leaves_alone_is_heard_with_its_state(shared: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_log, "_TOGETHER_S", 0.05)
    ranks = members(shared, 3)
    assert ranks[1].leave()
    assert ranks[1].left == [(1,)]
    assert ranks[0].leave("ValueError: x")
    assert ranks[0].left == [(1,), (0, 1)]
    states = next(event.states for event in ranks[0].heard if isinstance(event, PeersLeft))
    assert states[1].ended == FINISHED
    assert shared.num_keys() > 0  # the last one still reads
    assert ranks[2].leave() and ranks[2].left[-1] == (0, 1, 2)
    assert shared.num_keys() == 0


def test_all_ranks_see_that_something_was_claimed_and_the_look_claims_nothing(shared: dist.Store) -> None:
    first, second = members(shared, 2)
    assert not first.log.is_claimed("problem") and not second.log.is_claimed("problem")
    assert first.log.claim("problem") and second.log.is_claimed("problem") and not second.log.claim("problem")


def test_a_rank_that_raised_does_not_wait_for_others(shared: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_log, "_TOGETHER_S", 1e6)
    ranks = members(shared, 2)
    assert ranks[1].leave("ValueError: x") and ranks[1].left == [(1,)]
    assert ranks[0].leave()


def test_a_rank_that_dies_before_it_says_who_left_holds_up_nobody(
    shared: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_log, "_TOGETHER_S", 0.05)
    ranks = members(shared, 3)
    assert ranks[2].log.claim("left/0")  # and then it died
    assert ranks[0].leave() and ranks[0].left == [(0,)]
    assert all(on_threads(lambda rank: ranks[rank].leave(), [1, 2]))


def test_ranks_that_leave_one_after_the_other_share_entries(
    shared: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_log, "_TOGETHER_S", 0.2)
    ranks = members(shared, 24)

    def leave(rank: int) -> bool:
        ranks[rank].listener.has_ended(0.02 * rank)
        return ranks[rank].leave("ValueError: x" if rank % 2 else FINISHED)

    assert all(on_threads(leave, range(24)))
    assert max(len(one.left) for one in ranks) < 12
    assert {rank for one in ranks for rank in one.left[-1]} == set(range(24))
    assert shared.num_keys() == 0


def test_the_state_of_a_rank_that_left_is_read_once_and_only_when_asked_for() -> None:
    asked: list[int] = []

    def state_of(rank: int) -> RankState:
        asked.append(rank)
        return STATE

    left = LeftRanks(range(1000), state_of)
    assert (len(left), 7 in left, 1000 in left, asked) == (1000, True, False, [])
    assert left[7] is left[7] and asked == [7]
