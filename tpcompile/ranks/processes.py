"""A store and a rank -> whether the process of that rank has ended, where this host can observe it."""

from __future__ import annotations

import os

from pydantic import Field

from tpcompile.evidence.records import Frozen
from tpcompile.ranks.liveness import process_state, this_host
from tpcompile.ranks.store import RankStore


class Process(Frozen):
    """Where a rank runs."""

    pid: int = Field(ge=1, lt=1 << 31)
    host: str


class Processes:
    """The processes of the ranks that share the prefix of a store; every rank makes one, which publishes its own."""

    def __init__(self, store: RankStore) -> None:
        self._store = store
        here = Process(pid=os.getpid(), host=this_host())
        store.put(f"process/{store.rank}", here.model_dump(mode="json"))

    def is_gone(self, rank: int) -> bool:
        """True when the process of a rank is known to have ended."""
        process = self._store.peek(f"process/{rank}", Process)
        return process is not None and process_state(process.pid, process.host) == "dead"
