"""What a rank keeps of itself in the run directory while it runs -> evidence for whoever comes when the job is gone.

`kept/rank_N.json` is written when the sentinel begins, at growing intervals, when the rank waits in vain or is asked,
and when it ends. A process that is killed writes nothing then: its ring has the lines that it executed after that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpcompile.errors import TpCompileError
from tpcompile.evidence.records import Check, Frozen, UserLine
from tpcompile.evidence.records.bounds import Number, Rank, Seconds, WorldSize
from tpcompile.evidence.records.reader import read_record
from tpcompile.evidence.rundir import DEFAULT_PARENT, RunDir
from tpcompile.evidence.timeline.flow import Code, Flow
from tpcompile.recording.ring import flow_left
from tpcompile.sentinel import flight
from tpcompile.sentinel.blackbox import absence_of
from tpcompile.sentinel.executed import Executed
from tpcompile.sentinel.messages import FINISHED, RankState
from tpcompile.sentinel.process import Process
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog

TERMINATED, STOPPED = "received SIGTERM", "stopped by the sentinel"
_GROWS = 4
"""Factor of these intervals: to read 2,000 collectives takes 0.1 s of CPU time."""
_MAX_FLOWS = 64
"""Ranks of a job in which those that finish keep their lines: 100 KB each, which are seldom read."""


class Kept(Frozen):
    """One rank, as far as it could still write."""

    rank: Rank
    world_size: WorldSize
    domain: str
    members: tuple[Rank, ...]
    """The ranks that must do the same."""
    process: Process
    at_s: Seconds
    """Unix time of this."""
    state: RankState | None = None
    """What it did then."""
    num_recorded: Number = 0
    """Steps that its ring had then; more than that now, and it has gone on since."""
    end: str = ""
    """How it ended, in its own words; empty for one that was killed."""
    problem: Check | None = None
    """What it knew to be wrong when it ended."""
    issuing: tuple[Code, ...] = ()
    """Lines that had issued a collective."""
    flow: Flow | None = None
    """What it had executed when it ended; before that the ring has it."""
    stack: tuple[UserLine, ...] = ()
    """Where its main thread was when it aborted."""
    aborted: bool = False

    def with_ring(self) -> Kept:
        """The same with what its process left on this host: executed lines, and the stack of an abort."""
        absence = absence_of(self.process)
        flow = self.flow or flow_left(self.process.black_box)
        if flow is not None and not flow.issuing:
            flow = flow.model_copy(update={"issuing": self.issuing})
        aborted = self.aborted or absence.aborted
        return self.model_copy(update={"flow": flow, "stack": self.stack or absence.stack, "aborted": aborted})


def kept_file(rank: int) -> str:
    """Name in the run directory."""
    return f"kept/rank_{rank}.json"


class Keeper:
    """Writes what one rank keeps. It fails in silence: the job goes on, and what it says live needs none of this."""

    def __init__(
        self, log: StoreLog, snapshot: Snapshot, executed: Executed, *, domain: str, place: Callable[[], Path]
    ) -> None:
        self._log, self._snapshot, self._executed, self._place = log, snapshot, executed, place
        self._domain = domain
        self._lock = threading.Lock()
        self._folder = Path()
        self._process: Process | None = None
        self._has_ended = False
        self._next_s, self._pause_s = 0.0, 0.5

    def open(self) -> None:
        """Begin: say which process this rank is."""
        with suppress(TpCompileError, RuntimeError):
            self._folder = self._place().absolute()  # the program may go to a different folder
            self._process = self._log.process_of(self._log.rank)
        self._write({})

    def tick(self, now_s: float) -> None:
        """Keep the state after 0.5 s, and at growing intervals: then lines that issue collectives are known."""
        if now_s < self._next_s:
            return
        is_first, self._next_s = self._next_s == 0.0, now_s + self._pause_s
        self._pause_s *= _GROWS
        if not is_first:
            self.note()

    def note(self, state: RankState | None = None) -> None:
        """Keep what this rank does now."""
        with self._lock:
            if not self._has_ended:
                self._write(self._doing(state))

    def end(self, how: str, *, problem: Check | None = None, state: RankState | None = None) -> None:
        """Keep how this rank ends; a later end replaces an earlier one."""
        with self._lock:
            self._has_ended = True
            known: dict[str, Any] = {"end": how, "problem": problem}
            if how != FINISHED or self._log.world_size <= _MAX_FLOWS:
                known["flow"] = self._executed.flow_of(self._log.rank)
            self._write({**self._doing(state), **known})

    def adopt(self, rank: int) -> None:
        """Keep what a rank of this host has left that is gone, before its ring is removed."""
        with suppress(TpCompileError, OSError, ValueError):
            kept = read_record(Kept, self._folder / kept_file(rank)).with_ring()
            if kept.flow is not None or kept.stack:
                RunDir(self._folder).write_text(kept_file(rank), kept.to_json())

    def forget(self) -> None:
        """Remove what all ranks have kept: each of them has finished, and nothing was wrong."""
        with suppress(TpCompileError, OSError):
            folder = self._folder
            for file in (folder / "kept").glob("rank_*.json"):
                file.unlink()
            own = (folder.parent,) if folder.parent.name == DEFAULT_PARENT else ()
            for empty in (folder / "kept", folder, *own):
                empty.rmdir()  # an OSError ends this at the first that holds something else

    def _doing(self, state: RankState | None) -> dict[str, Any]:
        known = state or self._snapshot.state()
        return {
            "state": known,
            "num_recorded": self._executed.num_recorded,
            "issuing": flight.issuing_places(known.issued, known.messages),
        }

    def _write(self, known: dict[str, Any]) -> None:
        if self._process is None:
            return
        log = self._log
        kept = Kept(
            rank=log.rank,
            world_size=log.world_size,
            domain=self._domain,
            members=tuple(log.members),
            process=self._process,
            at_s=time.time(),
            **known,
        )
        with suppress(TpCompileError, OSError, RuntimeError):
            RunDir(self._folder).write_text(kept_file(log.rank), kept.to_json())
