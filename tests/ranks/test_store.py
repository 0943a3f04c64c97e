"""JSON through the c10d store: missing ranks are named, the first wins, no wait is endless."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import JsonValue

from tpcompile.evidence.records.base import Frozen
from tpcompile.ranks.store import Budget, RankStore
from tpcompile.testing import run_on_ranks


@pytest.fixture(params=["hash", "file", "tcp"])
def ranks(request: pytest.FixtureRequest, tmp_path) -> list[RankStore]:
    """Three ranks of one process on one store."""
    makers: dict[str, Callable[[], dist.Store]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 3),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    store = dist.PrefixStore("test", makers[request.param]())
    return [RankStore(store, rank=rank, world_size=3) for rank in range(3)]


@pytest.fixture
def three_clients() -> list[RankStore]:
    """Three ranks of one process, each with its own connection to a server."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it ends with its last reference
    clients = [server, *(dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2))]
    return [RankStore(client, rank=rank, world_size=3) for rank, client in enumerate(clients)]


@pytest.fixture
def three() -> list[RankStore]:
    """Three ranks of one process on a store in memory."""
    store = dist.HashStore()
    return [RankStore(store, rank=rank, world_size=3) for rank in range(3)]


def test_what_is_put_is_got_by_the_others(ranks: list[RankStore]) -> None:
    ranks[0].put("digest", {"rank": 0, "layers": [1, 2.5, None, "x"]})
    assert ranks[1].get("digest", JsonValue, timeout_s=1) == {"rank": 0, "layers": [1, 2.5, None, "x"]}


class _OfRank(Frozen):
    rank: int


def test_a_record_of_a_different_rank_is_got_too(three: list[RankStore]) -> None:
    three[0].put("left", {"rank": 0})
    assert three[1].get("left", _OfRank, timeout_s=1) == _OfRank(rank=0)


@pytest.mark.parametrize("value", [False, 0, "", [], {}])
def test_a_value_that_is_false_is_a_value(ranks: list[RankStore], value: object) -> None:
    ranks[0].put("flag", value)
    assert ranks[1].get("flag", JsonValue, timeout_s=1) == value


def test_a_long_value_is_short_in_the_store_and_as_long_as_it_is_for_a_budget(three: list[RankStore]) -> None:
    value = {"by": ["train.py:7 in step"] * 10_000}
    three[0].put("state", value)
    assert three[1].peek("state", JsonValue, budget=Budget(300_000)) == value
    assert three[1].peek("state", JsonValue, budget=Budget(100_000)) is None
    assert len(three[1]._store.get("state")) < 3_000
    assert [one.put_first("verdict", {"rank": one.rank, **value}, JsonValue)["rank"] for one in three] == [0] * 3


def test_a_later_value_replaces_an_earlier_one(ranks: list[RankStore]) -> None:
    ranks[0].put("phase", "one")
    ranks[0].put("phase", "two")
    assert ranks[1].peek("phase", str) == "two"


def test_a_value_that_a_peer_deletes_meanwhile_is_there_or_not(three_clients: list[RankStore]) -> None:
    """To ask whether there is one, and then for it, gets an empty one, or waits, where it is deleted in between."""
    writer, reader = three_clients[:2]
    stopped = threading.Event()

    def come_and_go() -> None:
        while not stopped.is_set():
            writer.put("news", [1])
            writer.delete("news")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        found = [reader.peek("news", list) or reader.why_refused("news") for _ in range(5_000)]
    finally:
        stopped.set()
        thread.join()
    assert [one for one in found if one not in ([1], "")] == []
    assert [1] in found
    assert "" in found


def test_peek_does_not_wait(ranks: list[RankStore]) -> None:
    assert ranks[0].peek("nothing", str) is None


def test_the_first_verdict_wins_and_every_rank_gets_it(ranks: list[RankStore]) -> None:
    assert [ranks[r].put_first("verdict", {"by": r}, JsonValue) for r in (1, 0, 2)] == [{"by": 1}] * 3
    assert ranks[2].peek("verdict", JsonValue) == {"by": 1}


def test_gather_returns_values_by_rank_and_names_the_missing(ranks: list[RankStore]) -> None:
    ranks[0].put("digest/0", "a")
    ranks[2].put("digest/2", "c")
    found, missing = ranks[0].gather({r: f"digest/{r}" for r in range(3)}, str, timeout_s=0.1)
    assert (found, missing) == ({0: "a", 2: "c"}, (1,))


def test_get_gives_up_after_its_timeout(three: list[RankStore]) -> None:
    started_s = time.monotonic()
    assert three[0].get("nothing", str, timeout_s=0.1) is None
    assert 0.1 <= time.monotonic() - started_s < 5


def test_a_timeout_of_zero_still_looks_once(three: list[RankStore]) -> None:
    three[1].put("digest", 1)
    assert three[0].get("digest", int, timeout_s=0) == 1


def test_gather_ends_as_soon_as_all_have_come(three: list[RankStore]) -> None:
    timer = threading.Timer(0.1, three[1].put, ("digest/1", "b"))
    timer.start()
    started_s = time.monotonic()
    assert three[0].gather({1: "digest/1"}, str, timeout_s=60) == ({1: "b"}, ())
    assert time.monotonic() - started_s < 30
    timer.join()


def test_gather_ends_early_at_the_alarm_and_still_names_the_missing(three: list[RankStore]) -> None:
    three[0].put("digest/0", "a")
    three[2].put("alarm", True)
    started_s = time.monotonic()
    found, missing = three[1].gather({0: "digest/0", 2: "digest/2"}, str, timeout_s=60, stop_at="alarm")
    assert (found, missing) == ({0: "a"}, (2,)) and time.monotonic() - started_s < 30


def test_a_value_written_just_before_the_alarm_is_found(
    three: list[RankStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = three[1].peek

    def peek(key: str, *kind: object, **limits: Any) -> object:
        found = look(key, *kind, **limits)
        three[0].put("digest/0", "a")
        three[2].put("alarm", True)
        return found

    monkeypatch.setattr(three[1], "peek", peek)
    assert three[1].gather({0: "digest/0"}, str, timeout_s=60, stop_at="alarm") == ({0: "a"}, ())


def test_a_rank_that_is_missing_costs_looks_at_it_alone(
    three: list[RankStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Counter[str]()
    look = three[0].peek

    def peek(key: str, *kind: object, **limits: Any) -> object:
        looked[key] += 1
        if looked["digest/0"] == 5:
            three[1].put("digest/0", "late")
        return look(key, *kind, **limits)

    monkeypatch.setattr(three[0], "peek", peek)
    for rank in range(1, 40):
        three[1].put(f"digest/{rank}", "a")
    found, missing = three[0].gather({rank: f"digest/{rank}" for rank in range(40)}, str, timeout_s=60)
    assert len(found) == 40 and not missing
    assert looked.pop("digest/0") == 5 and set(looked.values()) == {1}


def test_what_exceeds_the_budget_of_all_ranks_is_not_valid(three: list[RankStore]) -> None:
    for rank in range(3):
        three[rank].put(f"digest/{rank}", "a" * 100)
    keys = {rank: f"digest/{rank}" for rank in range(3)}
    found, missing = three[0].gather(keys, str, timeout_s=60, budget=Budget(250))
    assert (list(found), missing) == ([0, 1], (2,)) and "bytes" in three[0].why_refused("digest/2")
    assert len(three[0].gather(keys, str, timeout_s=60, budget=Budget(350))[0]) == 3


def test_a_value_that_a_rank_left_behind_is_found(three: list[RankStore]) -> None:
    def leaves(rank: int) -> bool:
        three[rank].put(f"digest/{rank}", "a")
        return True

    assert three[0].gather({1: "digest/1"}, str, timeout_s=60, gone=leaves) == ({1: "a"}, ())


def test_gather_does_not_wait_for_ranks_that_are_gone(three: list[RankStore]) -> None:
    started_s = time.monotonic()
    keys = {1: "digest/1", 2: "digest/2"}
    assert three[0].gather(keys, str, timeout_s=60, gone=lambda rank: rank in (1, 2)) == ({}, (1, 2))
    assert time.monotonic() - started_s < 30


def test_gather_waits_for_the_rank_that_is_not_gone(three: list[RankStore]) -> None:
    timer = threading.Timer(0.1, three[1].put, ("digest/1", "b"))
    timer.start()
    keys = {1: "digest/1", 2: "digest/2"}
    found, missing = three[0].gather(keys, str, timeout_s=60, gone=lambda rank: rank == 2)
    assert (found, missing) == ({1: "b"}, (2,))
    timer.join()


def test_wait_for_ranks_names_the_ranks_that_did_not_arrive(three: list[RankStore]) -> None:
    three[2].put("phase/2", True)
    assert three[0].wait_for_ranks("phase", timeout_s=0.1) == (1,)
    assert three[1].wait_for_ranks("phase", timeout_s=0.1) == ()


def test_wait_for_some_ranks_ignores_the_others(three: list[RankStore]) -> None:
    assert three[0].wait_for_ranks("phase", timeout_s=0.1, ranks=[0]) == ()


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", dist.ReduceOp.SUM])
def test_only_json_travels(three: list[RankStore], value: object) -> None:
    with pytest.raises(TypeError, match="JSON"):
        three[0].put("key", value)
    with pytest.raises(TypeError, match="JSON"):
        three[0].put_first("key", value, str)
    assert three[0].peek("key", JsonValue) is None


def test_connecting_without_a_server_raises_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RuntimeError):
        RankStore.connect("tpcompile", rank=0, world_size=2, timeout_s=0.3)


def test_prefixes_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    one, two = (RankStore.connect(name, rank=0, world_size=1) for name in ("one", "two"))
    one.put("key", 1)
    assert (one.peek("key", int), two.peek("key", int)) == (1, None)


def _exchange() -> tuple[tuple[int, ...], dict[int, object], object]:
    """Arrive, publish, gather, and agree on a first value, on a real rank."""
    rank = dist.get_rank()
    store = RankStore(dist.PrefixStore("x", dist.distributed_c10d._get_default_store()), rank=rank, world_size=2)
    missing = store.wait_for_ranks("start", timeout_s=30)
    store.put(f"digest/{rank}", {"rank": rank})
    found, _ = store.gather({r: f"digest/{r}" for r in range(2)}, JsonValue, timeout_s=30)
    return missing, found, store.put_first("verdict", rank, int)


def test_two_processes_exchange_and_agree() -> None:
    one, two = run_on_ranks(_exchange)
    assert one[:2] == two[:2] == ((), {0: {"rank": 0}, 1: {"rank": 1}})
    assert one[2] == two[2]


@pytest.mark.parametrize(("local_world_size", "is_there"), [("2", False), ("1", True)])
def test_a_restart_on_one_node_sees_nothing_of_the_attempt_before(
    local_world_size: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2"}
    for name, value in (environ | {"LOCAL_WORLD_SIZE": local_world_size}).items():
        monkeypatch.setenv(name, value)
    seen = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = RankStore.connect("sentinel", rank=0, world_size=2)
        seen.append(store.peek("alarm", str))
        store.put("alarm", attempt)
    # Nodes may count restarts apart, and would not meet under prefixes of their own.
    assert seen == [None, "0" if is_there else None]


def test_rank_0_leaves_when_the_others_need_its_store_no_more(three: list[RankStore]) -> None:
    for store in three[1:]:
        store.leave_together(timeout_s=60)  # they wait for nobody
    started_s = time.monotonic()
    three[0].leave_together(timeout_s=60)
    assert time.monotonic() - started_s < 30


def test_rank_0_does_not_wait_for_ever(three: list[RankStore]) -> None:
    three[1].leave_together(timeout_s=60)
    started_s = time.monotonic()
    three[0].leave_together(timeout_s=0.1)
    assert 0.1 <= time.monotonic() - started_s < 30
