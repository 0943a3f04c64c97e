"""The store that rank 0 serves does not end with rank 0."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.forked import free_port
from tests.rank_server import Call
from tpcompile.ranks import served
from tpcompile.ranks.env import RankEnv
from tpcompile.ranks.served import served_store
from tpcompile.ranks.store import RankStore

_GRACE_S = 1.0
"""Longer than the server needs to see that rank 0 is gone."""


def client(rank: int) -> RankStore:
    return RankStore.connect("test", rank=rank, world_size=2, timeout_s=60)


def serve_until_killed(environ: dict[str, str]) -> None:
    """Rank 0."""
    os.environ.update(environ)
    served._GRACE_S = _GRACE_S
    with served_store(RankEnv(rank=0, world_size=2, local_rank=0, local_world_size=2), timeout_s=60):
        client(0).get("rank 1 is here", timeout_s=60)
        os.kill(os.getpid(), signal.SIGKILL)


def test_it_serves_for_the_grace_after_rank_0_was_killed_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    rank_0 = Call(target=serve_until_killed, args=(place,))
    rank_0.start()
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    store = client(1)
    before = time.monotonic()
    store.put("rank 1 is here", True)
    with pytest.raises(RuntimeError):  # the end of the store
        store.wait("what no rank publishes", timeout_s=60)
    assert time.monotonic() - before >= _GRACE_S
    rank_0.join(60)
    assert rank_0.exitcode == -signal.SIGKILL
