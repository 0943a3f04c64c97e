"""Phases of a run, which all ranks begin together, and the facts that this rank measures in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from tpcompile.choices import AnyMode
from tpcompile.config import GateConfig, JobConfig
from tpcompile.gate.checks import STEADY
from tpcompile.gate.collective_agreement import Agreement
from tpcompile.gate.last_state import LastState
from tpcompile.gate.measurements import GateFacts
from tpcompile.gate.status import StatusBoard
from tpcompile.gate.watch import Watch
from tpcompile.ranks.store import RankStore
from tpcompile.recording import CaptureSession

RESIZED_CALLS = 3
Answer = TypeVar("Answer", bool, str)


@dataclass(frozen=True)
class InStep:
    """Keeps the ranks at the same phase; a rank that is missing ends the run."""

    limits: GateConfig
    store: RankStore
    board: StatusBoard
    watch: Watch
    last_state: LastState
    agreement: Agreement

    def begin(self, name: str, doing: str, *, timeout_s: float | None = None) -> None:
        """Publish that a phase begins and what it does, and set its deadline."""
        self.last_state.finished = self.board.phase
        self.board.enter(name, doing=doing)
        self.watch.deadline(name, timeout_s or self.limits.phase_timeout_s)

    def arrive(self, name: str) -> None:
        """Wait for all ranks at this phase, before any of them issues a collective."""
        missing = self.store.wait_for_ranks(f"at/{name}", timeout_s=self.limits.store_timeout_s)
        if missing:
            self.watch.end(self.agreement.missing(name, missing))
        self.last_state.finished = ""

    def begin_call(self) -> None:
        """Publish what this rank has issued before a steady call, in case it aborts in one."""
        self.last_state.begin_call(self.board.phase, self.store)

    def any_says(self, question: str, answer: bool) -> bool:
        """True when any rank answers True, on all ranks: they must take one branch before a collective."""
        return any(self.all_say(question, answer).values())

    def all_say(self, question: str, answer: Answer) -> dict[int, Answer]:
        """What every rank answers, on all ranks."""
        self.store.put(f"{question}/{self.store.rank}", answer)
        keys = {rank: f"{question}/{rank}" for rank in range(self.store.world_size)}
        found, late = self.store.gather(keys, type(answer), timeout_s=self.limits.store_timeout_s)
        if late:
            self.watch.end(self.agreement.missing(question, late))
        return found


@dataclass
class Phases:
    """Phases of one program on this rank, and the facts measured in them."""

    config: JobConfig
    device: torch.device
    session: CaptureSession
    ranks: InStep
    facts: GateFacts = field(default_factory=GateFacts, kw_only=True)
    folder: Path | None = field(default=None, kw_only=True)
    """The run directory."""

    @contextmanager
    def phase(self, name: str, doing: str, *, before: Callable[[], object] = lambda: None) -> Iterator[None]:
        """One phase of the run on all ranks; `before` is called ahead of the wait for the other ranks."""
        self.ranks.begin(name, doing)
        before()
        self.ranks.arrive(name)
        with self.session.phase(name):
            yield

    def compile(self, program: Any, **options: Any) -> Any:
        """torch.compile as configured; breaks are allowed so that they can be reported."""
        settings = self.config.compile
        return torch.compile(program, backend=settings.backend, dynamic=settings.dynamic, **options)

    def steady(self, mode: AnyMode, call: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> None:
        """The steady calls: nothing may compile; their median time is a fact."""
        times_ms = []
        with self.phase(f"{mode}/{STEADY}", f"{self.config.gate.steady_calls} calls", before=before):
            for _ in range(self.config.gate.steady_calls):
                self.ranks.begin_call()
                start = time.perf_counter()
                call()
                times_ms.append((time.perf_counter() - start) * 1e3)
        median_ms = round(statistics.median(times_ms), 4)
        self.facts = self.facts.changed(median_ms=self.facts.median_ms | {mode: median_ms})

    def finish_device(self) -> None:
        """Return when the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
