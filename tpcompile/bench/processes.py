"""The task of a program's ranks -> their processes, which answer requests together within a time limit.

All ranks have answered a request before the next is sent: those without an answer are the ones that hang, and the
request is where.
ProgramFailed: a rank raised an exception. RankLost: a rank died or did not answer in time; it is named.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tpcompile.bench import worker
from tpcompile.bench.worker import Task
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.ranks.pool import with_store

_START = "the start of its process group"
_SETTLED_S = 2.0
"""How long to wait, after a rank has failed, for the death of a peer that may have caused the failure."""
_CLOSED_S = 20.0
"""Time for ranks to release graphs and destroy the process group."""
_KILLED_S = 10.0
_STACKS_S = 0.5
"""Time for a rank to write its stacks."""


class ProgramFailed(Exception):
    """A rank raised an exception, told in one line."""

    def __init__(self, rank: int, why: str, *, is_refusal: bool) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.is_refusal = rank, is_refusal
        """The program refused to run here (ConfigError, PreflightError); otherwise it failed."""


class RankLost(Exception):
    """Ranks died or hung in `place`."""

    def __init__(self, program: str, ranks: Sequence[int], place: str, why: str, *, timed_out: bool = False) -> None:
        super().__init__(f"{program}: {why}")
        self.ranks, self.place, self.why, self.timed_out = ranks, place, why, timed_out


class Ranks:
    """All ranks of one program, which take each step together."""

    def __init__(
        self,
        name: str,
        connections: Sequence[Connection],
        processes: Sequence[BaseProcess],
        *,
        timeout_s: float,
        store: object = None,
    ) -> None:
        self.name, self._timeout_s = name, timeout_s
        self._connections, self._processes = connections, processes
        self._store = store  # served as long as this object exists
        self._place = _START

    @classmethod
    def started(cls, task: Task, world_size: int, *, is_gpu: bool) -> Ranks:
        """Start the processes, with a store of their own, so that keys of two programs never meet."""
        context = _context(is_gpu)
        connections = []

        def start(rank: int, variables: Mapping[str, str], _: object) -> BaseProcess:
            own, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=worker.main, args=(theirs, task, variables))
            process.start()
            theirs.close()
            connections.append(own)
            return process

        processes, store = with_store(world_size, start)
        return cls(task.program, connections, processes, timeout_s=task.timeout_s, store=store)

    def ask(self, step: str, *values: Any) -> list[dict[str, Any]]:
        """Have all ranks take a step, when all are in their group, and return their answers. Raises as `answers`."""
        if self._place == _START:
            self.answers()
        self._place = f"the {step.replace('_', ' ')}"
        for connection in self._connections:
            with suppress(OSError):  # the rank died, which `answers` finds
                connection.send((step, values))
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """One answer of every rank, by rank. Raises ProgramFailed when one raised, RankLost when one died or hangs."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(found) < len(self._connections):
            if not self._receive(found, deadline):
                raise self._timed_out([rank for rank in range(len(self._connections)) if rank not in found])
            self._check_failed(found)
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

    def _receive(self, found: dict[int, dict[str, Any]], deadline: float) -> bool:
        """Wait for the next answers and add them to those found; False for none in time. Raises RankLost."""
        missing = {one: rank for rank, one in enumerate(self._connections) if rank not in found}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        for connection in ready:
            rank = missing[connection]  # type: ignore[index]  # `wait` returns what it was given
            try:
                found[rank] = self._connections[rank].recv()
            except (EOFError, ConnectionError):
                process = self._processes[rank]
                process.join(_KILLED_S)
                why = f"rank {rank} died in {self._place}, exit code {process.exitcode}; see its log"
                raise RankLost(self.name, [rank], self._place, why) from None
        return bool(ready)

    def _check_failed(self, found: dict[int, dict[str, Any]]) -> None:
        """Raise ProgramFailed for a rank that raised, but RankLost for one that died: its peers fail because of it."""
        failed = [rank for rank, answer in found.items() if "failed" in answer]
        if not failed:
            return
        deadline = time.monotonic() + _SETTLED_S
        is_open = True
        while is_open and len(found) < len(self._connections):
            is_open = self._receive(found, deadline)
        answer = found[failed[0]]
        raise ProgramFailed(failed[0], answer["failed"], is_refusal=answer["is_refusal"])

    def _timed_out(self, ranks: Sequence[int]) -> RankLost:
        """The error for ranks that did not answer in time; has them write their stacks to their logs first."""
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, worker.STACKS)
        time.sleep(_STACKS_S)
        why = f"no answer of {named_ranks(ranks)} in {self._place} within {self._timeout_s:g} s; see their logs"
        return RankLost(self.name, ranks, self._place, why, timed_out=True)


def _context(is_gpu: bool) -> Any:
    """Ranks on a CPU are forked from a server that has imported torch; CUDA cannot be used in a forked process."""
    if is_gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context
