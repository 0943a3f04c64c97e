"""The tasks of a program's ranks -> their processes, which answer requests together within a time limit.

ProgramFailed: a rank raised an exception. RankLost: a rank died or did not answer in time; it is named.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tpcompile.bench import worker
from tpcompile.bench.worker import Task
from tpcompile.ranks.pool import with_store

_SETTLED_S = 2.0
"""After a rank has failed: a peer whose death caused the failure is seen to be dead within this time."""
_CLOSED_S = 20.0
"""Time for ranks to release graphs and destroy the process group."""
_KILLED_S = 10.0
_STACKS_S = 0.5
"""Time for a rank to write its stacks."""


class ProgramFailed(Exception):
    """A rank raised an exception, told in one line."""

    def __init__(self, why: str, *, is_refusal: bool) -> None:
        super().__init__(why)
        self.is_refusal = is_refusal
        """The program refused to run here (ConfigError, PreflightError); otherwise it failed."""


class RankLost(Exception):
    """A rank died or hung; the text names it."""

    def __init__(self, program: str, why: str, *, timed_out: bool = False) -> None:
        super().__init__(f"{program}: {why}")
        self.why, self.timed_out = why, timed_out


def _silent(_place: str) -> None:
    pass


class Ranks:
    """All ranks of one program; `at` is called with each step that all of them have reached."""

    def __init__(
        self,
        name: str,
        connections: Sequence[Connection],
        processes: Sequence[BaseProcess],
        *,
        timeout_s: float,
        at: Callable[[str], None] = _silent,
    ) -> None:
        self.name, self._timeout_s, self._at = name, timeout_s, at
        self._connections, self._processes = connections, processes
        self._passed: list[list[str]] = [[] for _ in connections]
        """The steps that each rank has reached, in order."""
        self._store: object = None
        """The store of the ranks; it is served as long as this object exists."""

    @classmethod
    def started(cls, tasks: Sequence[Task], *, is_gpu: bool, at: Callable[[str], None] = _silent) -> Ranks:
        """Start the processes, with a store of their own, so that keys of two programs never meet."""
        context = _context(is_gpu)
        connections = []

        def start(rank: int, variables: Mapping[str, str], _: object) -> BaseProcess:
            own, theirs = context.Pipe()
            task = replace(tasks[rank], environ={**tasks[rank].environ, **variables})
            process: BaseProcess = context.Process(target=worker.main, args=(theirs, task))
            process.start()
            theirs.close()
            connections.append(own)
            return process

        processes, store = with_store(len(tasks), start)
        ranks = cls(tasks[0].program, connections, processes, timeout_s=tasks[0].timeout_s, at=at)
        ranks._store = store
        return ranks

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send all ranks a request and return their answers, by rank. Raises as `answers`."""
        for connection in self._connections:
            with suppress(OSError):  # the rank died, which `answers` finds
                connection.send(dict(request))
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """One answer of every rank, by rank. Raises ProgramFailed when one raised, RankLost when one died or hangs."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while missing := self._missing(found):
            found |= self._received(missing, deadline)
            failed = {rank: answer for rank, answer in found.items() if "failed" in answer}
            if failed:
                self._check_dead(found)
                rank, answer = next(iter(failed.items()))
                raise ProgramFailed(f"rank {rank}: {answer['failed']}", is_refusal=answer["is_refusal"])
            if time.monotonic() > deadline and self._missing(found):
                missing = self._missing(found)
                self._write_stacks(missing)
                raise RankLost(self.name, self._late(missing), timed_out=True)
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """Ask the ranks to exit, and kill those that do not in time."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + _CLOSED_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(_KILLED_S)
        for connection in self._connections:
            connection.close()

    def _received(self, missing: Sequence[int], deadline: float) -> dict[int, dict[str, Any]]:
        """The answers that have arrived when the first message does; empty when that is a step and no answer."""
        ready = wait([self._connections[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
        answers = {rank: self._answer_of(rank) for rank in missing if self._connections[rank] in ready}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _answer_of(self, rank: int) -> dict[str, Any] | None:
        """The answer of a rank that has sent something; None when it has only sent steps. Raises RankLost."""
        try:
            while self._connections[rank].poll():
                message = self._connections[rank].recv()
                if "at" not in message:
                    return message
                self._pass(rank, message["at"])
        except (EOFError, ConnectionError):
            raise self._lost(rank) from None
        return None

    def _pass(self, rank: int, place: str) -> None:
        passed = self._passed[rank]
        passed.append(place)
        if min(map(len, self._passed)) == len(passed):
            self._at(place)

    def _check_dead(self, found: Mapping[int, dict[str, Any]]) -> None:
        """Raise RankLost for a rank that died: its peers fail because of it."""
        found, deadline = dict(found), time.monotonic() + _SETTLED_S
        while (missing := self._missing(found)) and time.monotonic() < deadline:
            found |= self._received(missing, deadline)

    def _missing(self, found: Mapping[int, Any]) -> list[int]:
        return [rank for rank in range(len(self._connections)) if rank not in found]

    def _write_stacks(self, late: Sequence[int]) -> None:
        """Let these ranks write the stacks of their threads to their logs."""
        for rank in late:
            pid = self._processes[rank].pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, worker.STACKS)
        time.sleep(_STACKS_S)

    def _late(self, missing: Sequence[int]) -> str:
        """What to say of ranks without an answer; the one that is behind the others first, since they wait for it."""
        behind = sorted(missing, key=lambda rank: len(self._passed[rank]))
        places = "; ".join(f"rank {rank} in {self._place(rank)}" for rank in behind)
        return f"no answer within {self._timeout_s:g} s: {places}; see their logs"

    def _lost(self, rank: int) -> RankLost:
        process = self._processes[rank]
        process.join(_KILLED_S)
        why = f"rank {rank} died in {self._place(rank)}, exit code {process.exitcode}; see its log"
        return RankLost(self.name, why)

    def _place(self, rank: int) -> str:
        return self._passed[rank][-1] if self._passed[rank] else "its start"


def _context(is_gpu: bool) -> Any:
    """Ranks on a CPU are forked from a server that has imported torch; CUDA cannot be used in a forked process."""
    if is_gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context
