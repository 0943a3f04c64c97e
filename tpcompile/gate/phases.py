"""Phases of a run, on all ranks alike, and the facts that this rank measures in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tpcompile.choices import AnyMode
from tpcompile.config import JobConfig
from tpcompile.gate.checks import STEADY
from tpcompile.gate.measurements import GateFacts
from tpcompile.recording import CaptureSession

RESIZED_CALLS = 3


@dataclass
class Phases:
    """Phases of one program on this rank, and the facts measured in them."""

    config: JobConfig
    device: torch.device
    session: CaptureSession
    begin: Callable[[str, str], None]
    """Called at the start of a phase with its name and what it does: status, deadline."""
    arrive: Callable[[str], None]
    """Waits until all ranks are at that phase."""
    any_rank: Callable[[str, bool], bool]
    """(question, this rank's answer) -> true when any rank answers with True; waits for the answers of all ranks."""
    begin_call: Callable[[], None]
    """Called before each steady call."""
    facts: GateFacts = field(default_factory=GateFacts, kw_only=True)

    @contextmanager
    def phase(self, name: str, doing: str, *, before: Callable[[], object] = lambda: None) -> Iterator[None]:
        """One phase of the run on all ranks; `before` is called ahead of the wait for the other ranks."""
        self.begin(name, doing)
        before()
        self.arrive(name)
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
                self.begin_call()
                start = time.perf_counter()
                call()
                times_ms.append((time.perf_counter() - start) * 1e3)
        median_ms = round(statistics.median(times_ms), 4)
        self.facts = self.facts.changed(median_ms=self.facts.median_ms | {mode: median_ms})

    def finish_device(self) -> None:
        """Return when the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
