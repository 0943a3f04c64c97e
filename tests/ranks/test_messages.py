"""What a client of the job's store writes is used as the message that it should be, or not at all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks.messages import MESSAGES, STATE
from tpcompile.evidence.records.bounds import MAX_BYTES
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel.messages import RankState

WORLD_SIZE = 2
NO_RANK = (WORLD_SIZE, -1, 10**12)
RANKS = ("rank", "ranks", "peer", "members", "gone", "domain")
"""Fields of messages that hold ranks, or tables of them."""
NOT_JSON = (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000)
NOT_A_MESSAGE: tuple[Any, ...] = (None, True, 5, [[]], {"unknown": 1}, {"rank": {}}, {"path": "/etc/passwd"})


@pytest.fixture
def shared() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def client(shared: dist.Store) -> RankStore:
    return RankStore(shared, rank=0, world_size=WORLD_SIZE)


def name_of(message: tuple[Any, Any]) -> str:
    kind, valid = message
    entry = valid.get("kind", "") if isinstance(valid, dict) else ""
    return entry or getattr(kind, "__name__", str(kind))


@pytest.fixture(params=MESSAGES, ids=name_of)
def message(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A kind of message, and a valid one."""
    return request.param


def read(client: RankStore, shared: dist.Store, kind: Any, raw: bytes | str) -> Any | None:
    shared.set("key", raw)
    return client.peek("key", kind)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every part of JSON that is no table, with its path."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def changed(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """The JSON with a different part there."""
    if not path:
        return part
    copied = value.copy()
    copied[path[0]] = changed(value[path[0]], path[1:], part)
    return copied


def test_a_valid_message_is_read(message: tuple[Any, Any], client: RankStore, shared: dist.Store) -> None:
    """The control of all that follows."""
    kind, valid = message
    assert read(client, shared, kind, json.dumps(valid)) is not None
    assert client.why_refused("key") == ""


def test_what_is_no_such_message_counts_as_not_written(
    message: tuple[Any, Any], client: RankStore, shared: dist.Store
) -> None:
    for raw in (*NOT_JSON, *map(json.dumps, NOT_A_MESSAGE)):
        assert read(client, shared, message[0], raw) is None, raw[:30]
        reason = client.why_refused("key")
        assert reason and "\n" not in reason and len(reason) < 1000


def test_a_part_of_a_different_type_counts_as_not_written(
    message: tuple[Any, Any], client: RankStore, shared: dist.Store
) -> None:
    kind, valid = message
    for path, part in leaves(valid):
        assert read(client, shared, kind, json.dumps(changed(valid, path, {"a": [1]}))) is None, path
        if isinstance(part, int) and not isinstance(part, bool) and path[0] != "schema_version":
            assert read(client, shared, kind, json.dumps(changed(valid, path, "many"))) is None, path


def test_ranks_are_those_of_the_job(message: tuple[Any, Any], client: RankStore, shared: dist.Store) -> None:
    kind, valid = message
    of_ranks = [path for path, part in leaves(valid) if isinstance(part, int) and set(path) & set(RANKS)]
    for path in of_ranks:
        for rank in NO_RANK:
            assert read(client, shared, kind, json.dumps(changed(valid, path, rank))) is None, path
            why = client.why_refused("key")
            assert "job of 2 ranks" in why or "Input should" in why


def test_a_message_that_is_too_long_is_not_parsed(
    message: tuple[Any, Any], client: RankStore, shared: dist.Store
) -> None:
    kind, valid = message
    text = json.dumps(valid)
    assert read(client, shared, kind, text + " " * (MAX_BYTES - len(text))) is not None
    assert read(client, shared, kind, text + " " * (MAX_BYTES + 1 - len(text))) is None
    assert re.fullmatch(f"{MAX_BYTES + 1} bytes, .* {MAX_BYTES}", client.why_refused("key"))


@pytest.mark.parametrize("raw", ['{"not": "this"}', b"\xff\xfe"])
def test_a_first_value_that_is_no_such_message_is_replaced_by_one_that_is(raw: bytes | str, shared: dist.Store) -> None:
    ranks = [RankStore(shared, rank=rank, world_size=WORLD_SIZE) for rank in range(WORLD_SIZE)]
    shared.set("key", raw)
    mine = [STATE.model_copy(update={"rank": rank}) for rank in range(WORLD_SIZE)]
    found = [
        store.put_first("key", own.model_dump(mode="json"), RankState) for store, own in zip(ranks, mine, strict=True)
    ]
    assert found == [mine[0], mine[0]]


def test_a_rank_that_sends_something_else_is_missing_at_once(client: RankStore, shared: dist.Store) -> None:
    shared.set("state/1", "[]")
    started_s = time.monotonic()
    assert client.gather({1: "state/1"}, RankState, timeout_s=60) == ({}, (1,))
    assert client.get("state/1", RankState, timeout_s=60) is None
    assert time.monotonic() - started_s < 30


def test_a_rank_cannot_speak_for_a_different_one(client: RankStore, shared: dist.Store) -> None:
    shared.set("state/0", STATE.to_json())
    shared.set("state/1", STATE.to_json())
    found, missing = client.gather({0: "state/0", 1: "state/1"}, RankState, timeout_s=0)
    assert (found, missing) == ({1: STATE}, (0,))
    assert client.why_refused("state/0") == "rank: it says 1"


def test_what_is_not_valid_is_logged_once_with_its_key(
    client: RankStore, shared: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.set("state/1", "[]")
    for _ in range(3):
        client.peek("state/1", RankState)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("tpcompile store")]
    assert "WARNING" in line and "state/1" in line


def test_a_valid_value_that_comes_later_is_used(client: RankStore, shared: dist.Store) -> None:
    shared.set("state/1", "[]")
    assert client.peek("state/1", RankState) is None
    shared.set("state/1", STATE.to_json())
    assert client.peek("state/1", RankState) == STATE
    assert client.why_refused("state/1") == ""
