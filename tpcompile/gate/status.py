"""State of this rank -> the store, for the other ranks, and the run directory, to be read after a crash."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from rich.console import Console

from tpcompile.errors import PreflightError
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.ranks.liveness import host_name, process_state, this_host
from tpcompile.ranks.store import RankStore

ENDED = frozenset({"finished", "failed", "stopped", "unwritten"})
"""States that a rank publishes last."""


class StatusBoard:
    """Publishes the state of this rank; `last_seen` describes the state of a different rank."""

    def __init__(self, run_dir: RunDir, store: RankStore, *, prints_phases: bool = True) -> None:
        """Rank 0 prints each phase to stderr when that is a terminal, unless `prints_phases` is false."""
        self._run_dir, self._store, self._prints_phases = run_dir, store, prints_phases
        self._console = Console(stderr=True)
        self.phase = "start"

    def enter(self, phase: str, *, doing: str = "") -> None:
        """Publish that a phase begins; on a terminal, rank 0 also prints it."""
        self.phase = phase
        self.publish("running")
        if self._prints_phases and self._store.rank == 0 and self._console.is_terminal:
            self._console.print(f"[dim]{phase}[/dim] {doing}", highlight=False)

    def last_seen(self, rank: int) -> str:
        """The last state that `rank` published, and whether its process died (known on the same host only)."""
        status = self._status_of(rank)
        if status is None:
            return "never: it did not reach the store"
        died = f"; its process {status.pid} died" if self.is_gone(rank) else ""
        return f"{status.state} in phase {status.phase} on {status.host}{died}"

    def died(self) -> dict[int, str]:
        """Ranks whose process is known to have died before it published one of `ENDED` -> `last_seen`."""
        seen = {rank: self._status_of(rank) for rank in range(self._store.world_size)}
        return {
            rank: self.last_seen(rank)
            for rank, status in seen.items()
            if status is not None and status.state not in ENDED and _is_dead(status)
        }

    def host_of(self, rank: int) -> str:
        """Name of its host; empty where it has not published a state."""
        status = None
        with suppress(RuntimeError):  # the store does not respond
            status = self._status_of(rank)
        return "" if status is None else host_name(status.host)

    def is_gone(self, rank: int) -> bool:
        """True when the rank's process is known to be dead; on a different host that is not known."""
        status = self._status_of(rank)
        return status is not None and _is_dead(status)

    def has_left(self, rank: int, phase: str) -> bool:
        """True when the last phase that `rank` published is not `phase`."""
        status = self._status_of(rank)
        return status is not None and status.phase != phase

    def _status_of(self, rank: int) -> RankStatus | None:
        found: RankStatus | None = self._store.peek(f"status/{rank}", RankStatus, sender=rank)
        return found

    def publish(self, state: str, *, error: str = "") -> None:
        """Publish what this rank does within the phase, or how it ended: one of `ENDED`, and the error if any."""
        status = RankStatus(
            rank=self._store.rank,
            world_size=self._store.world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            namespace=this_host(),
            phase=self.phase,
            state=state,
            error=error,
        )
        with suppress(PreflightError):  # a full disk is reported when the record or the verdict cannot be written
            self._run_dir.write_status(status)
        with suppress(RuntimeError):  # the watch reports a store that does not respond; here it would hide the error
            self._store.put(f"status/{self._store.rank}", status.model_dump(mode="json"))


def _is_dead(status: RankStatus) -> bool:
    return process_state(status.pid, status.namespace) == "dead"
