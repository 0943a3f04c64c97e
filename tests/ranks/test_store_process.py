"""The store that rank 0 serves does not end with rank 0."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import forked
from tpcompile.pytest_plugin.files import Job
from tpcompile.ranks import store_process
from tpcompile.ranks.env import RankEnv
from tpcompile.ranks.store import RankStore
from tpcompile.ranks.store_process import served_store

_GRACE_S = 1.0
"""Longer than the server needs to see that rank 0 is gone."""


def client(rank: int) -> RankStore:
    return RankStore.connect("test", rank=rank, world_size=2, timeout_s=60)


def serve_until_killed(_job: Job, _rank: int, _variables: Mapping[str, str]) -> None:
    """Rank 0."""
    store_process._GRACE_S = _GRACE_S
    with served_store(RankEnv(rank=0, world_size=2, local_rank=0, local_world_size=2), timeout_s=60):
        client(0).get("rank 1 is here", bool, timeout_s=60)
        os.kill(os.getpid(), signal.SIGKILL)


def test_it_serves_for_the_grace_after_rank_0_was_killed_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(forked.free_port()))
    with forked.start(f"{__name__}:serve_until_killed", tmp_path, {}) as rank_0:
        store = client(1)
        before = time.monotonic()
        store.put("rank 1 is here", True)
        with pytest.raises(RuntimeError):  # the end of the store
            store.wait("what no rank publishes", timeout_s=60)
        assert time.monotonic() - before >= _GRACE_S
        rank_0.is_served(60)
        assert rank_0.exit_codes() == [-signal.SIGKILL]
