"""A run that ends early -> the state of every rank, through the store; a rank that aborts leaves its stack.

A rank that is alive publishes its state as soon as it sees the alarm, on a different thread than the main one, which
may wait in a collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records import Check, CheckId, Status, UserLine
from tpcompile.evidence.records.base import known
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.gate.call_numbers import Calls
from tpcompile.gate.stuck import explained, is_of_wait
from tpcompile.ranks.exchange import Others
from tpcompile.ranks.liveness import this_host
from tpcompile.ranks.store import LINE, RankStore
from tpcompile.recording import early
from tpcompile.recording.flow import FlowRecorder
from tpcompile.recording.ring import flow_left
from tpcompile.sentinel import flight
from tpcompile.sentinel.blackbox import BlackBox, absence_of, forget
from tpcompile.sentinel.describe import clock_text
from tpcompile.sentinel.messages import FINISHED, RUNNING, Issued, RankState
from tpcompile.sentinel.process import Process
from tpcompile.sentinel.situation import Lost
from tpcompile.sentinel.snapshot import state_of
from tpcompile.torch_api import watching

_ANSWER_S = 2.0


class LastState:
    """What this rank leaves for the others, and what it reads of them."""

    def __init__(self, rank: int) -> None:
        self._rank, self._main_thread = rank, threading.main_thread().ident or 0
        self._black_box, self._flow = BlackBox(), FlowRecorder()
        self._raised_at: tuple[UserLine, ...] = ()
        self._has_raised = False
        self._blocked_since_s: float | None = None
        self._calls = Calls(phase="")
        self.finished = ""
        """The phase that this rank has finished, while it waits for the other ranks before the next one."""

    def open(self, store: RankStore) -> None:
        """Publish the process of this rank, and the name of the file that it leaves if it aborts."""
        self._black_box.open()
        self._flow = early.recorder()
        self._flow.start(self._black_box.name)
        here = Process(pid=os.getpid(), host=this_host(), black_box=self._black_box.name, main_thread=self._main_thread)
        store.put(f"process/{self._rank}", here.model_dump(mode="json"))

    def close(self) -> None:
        """Remove the files."""
        self._black_box.close()
        self._flow.stop()

    @contextmanager
    def not_followed(self) -> Iterator[None]:
        """What this rank executes inside is not recorded: runs that search for a mistake are none of the program's."""
        self._flow.pause(True)
        try:
            yield
        finally:
            self._flow.pause(False)

    def waits_in(self) -> object | None:
        """What the main thread waits in, in communication or for the store; equal while it does not move."""
        if not (flight.is_blocked(watching.main_thread_frame(self._main_thread)) or LINE.is_asking(self._main_thread)):
            return None
        return tuple(issued.id for issued in flight.recorded())

    def flow_of(self, rank: int, store: RankStore) -> Flow | None:
        """What this rank has executed, or what a rank has left that has ended."""
        if rank != self._rank:
            with suppress(RuntimeError):  # the store does not respond
                return flow_left(process_of(rank, store).black_box)
            return None
        found = self._flow.flow()
        return found and found.changed(issuing=flight.issuing_places(flight.recorded()))

    def begin_call(self, phase: str, store: RankStore) -> None:
        """Publish the numbers of this rank's collectives before a call of that phase."""
        earlier = self._calls.begun if self._calls.phase == phase else ()
        self._flow.mark(phase, len(earlier) + 1)
        self._calls = Calls(phase=phase, begun=(*earlier, watching.collective_numbers([self._rank])))
        store.put(f"calls/{self._rank}", self._calls.model_dump(mode="json"))

    def raised(self, check: Check) -> None:
        """Record that an exception has left the program: its stack no longer shows where this rank was."""
        self._has_raised, self._raised_at = True, tuple(known([check.line]))

    def waits_too_long(self, limit_s: float, mode: str) -> Check | None:
        """The failed check of a collective in which the main thread has waited for `limit_s`."""
        now_s = time.monotonic()
        if not flight.is_blocked(watching.main_thread_frame(self._main_thread)):
            self._blocked_since_s = None
            return None
        self._blocked_since_s = since_s = self._blocked_since_s or now_s
        if now_s - since_s < limit_s:
            return None
        oldest = _oldest(flight.recorded())
        if oldest is None or oldest.age_s < limit_s:
            return None
        return Check(
            id=CheckId.MOVING,
            mode=mode,
            status=Status.FAIL,
            expected=f"every collective ends within gate.store_timeout_s = {limit_s:g} s",
            observed=f"rank {self._rank} has waited {oldest.age_s:.0f} s in {oldest}",
            line=oldest.line,
        )

    def explained(self, check: Check, store: RankStore, others: Others) -> tuple[Check, ...]:
        """The check, and the one that it follows from; every rank calls it, with the same check."""
        with suppress(RuntimeError):  # the store does not respond
            store.put(f"state/{self._rank}", self.state().model_dump(mode="json"))
            if is_of_wait(check):
                keys = {rank: f"state/{rank}" for rank in range(store.world_size)}
                found, late = store.gather(keys, RankState, timeout_s=_ANSWER_S, gone=others.is_gone)
                states = dict(sorted(found.items()))
                hosts = {state.host for state in states.values()}
                lost = {rank: _lost(rank, process_of(rank, store), others, answering=hosts) for rank in late}
                calls = {rank: store.peek(f"calls/{rank}", Calls) for rank in keys}
                return explained(
                    check,
                    ByRank(states),
                    {rank: one for rank, one in lost.items() if one},
                    {rank: found for rank, found in calls.items() if found is not None},
                )
        return (check,)

    def state(self) -> RankState:
        """What this rank does now, or did last."""
        frame = watching.main_thread_frame(self._main_thread)
        state = state_of(frame, is_held=flight.is_blocked(frame), rank=self._rank, activity=RUNNING, since_s=0.0)
        if self._has_raised:
            # the last one in flight: it has failed, and the recorder does not say whether it ended
            last = state.latest
            issued = tuple(one.changed(is_done=False) if one == last else one for one in state.issued)
            return state.changed(stack=self._raised_at, issued=issued)
        if self.finished:
            return state.changed(stack=(), ended=FINISHED, phase=self.finished)
        return state


def _oldest(issued: tuple[Issued, ...]) -> Issued | None:
    in_flight = [one for one in issued if not one.is_done]
    return max(in_flight, key=lambda one: one.age_s, default=None)


def process_of(rank: int, store: RankStore) -> Process:
    """The process that a rank published."""
    return store.peek(f"process/{rank}", Process) or Process()


def forget_dead(store: RankStore, others: Others) -> None:
    """Remove the files that dead ranks left, after all ranks have read them."""
    with suppress(RuntimeError):
        for rank in filter(others.is_gone, range(store.world_size)):
            forget(process_of(rank, store).black_box)


def _lost(rank: int, process: Process, others: Others, *, answering: Collection[str]) -> Lost | None:
    """A rank that did not answer; None where its process may be alive, on a host of which ranks answer."""
    absence = absence_of(process)
    if absence.may_live:
        is_away = bool(absence.host) and absence.host not in answering
        if not is_away:
            return None
        oldest = _oldest(flight.recorded())  # this rank waits in it, or for the answer to its question
        waited_s = _ANSWER_S if oldest is None else oldest.age_s
        since = clock_text(time.time() - waited_s, for_s=waited_s)
        return Lost(rank, "silent", host=absence.host, since=since, is_final=True)
    how = "died" if absence.how == "dead" else absence.how
    return Lost(rank, how, others.last_seen(rank), absence.stack, absence.aborted, is_final=True)
