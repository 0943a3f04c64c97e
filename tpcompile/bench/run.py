"""Presets and names of programs -> a report: reference and floors, then all programs at once, which take turns."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from tpcompile.bench.floors import bound
from tpcompile.bench.names import BY_SIZE, Name, why_not
from tpcompile.bench.processes import ProgramFailed, RankLost, Ranks
from tpcompile.bench.records import Floors, Machine, Measured, Power, Profile, Row
from tpcompile.bench.worker import FLOORS, Task
from tpcompile.config import RunConfig

_ROUND_MS = 60.0
"""About how long each program is called in a round, between the fewest and the most calls."""
_FEWEST_CALLS, _MOST_CALLS = 3, 50
_POWER_MS = 1500.0
"""How long each program is called for its energy: NVML's counter moves every 0.1 s."""
Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arguments of the command line, checked."""

    settings: Sequence[RunConfig]
    names: Sequence[Name]
    world_size: int
    rounds: int
    jobs: int
    """Programs that are prepared at the same time."""
    cores_per_rank: int
    """Compile threads of a program that is compiled while no other is."""
    timeout_s: float
    """Limit of each answer of a rank."""
    keeps_going: bool
    """A program with a rank that died or hung becomes a row, like one that raised."""
    logs: Path

    @property
    def is_gpu(self) -> bool:
        """Every rank has its own GPU."""
        return self.settings[0].device == "cuda"


@dataclass
class Entry:
    """One program, while it is measured."""

    name: Name
    row: Row
    ranks: Ranks | None = None
    """None when it cannot run, or has ended."""

    def end(self, why: str, *, has_failed: bool) -> None:
        """End a program that failed; the others go on."""
        if self.ranks is not None:
            self.ranks.kill()
        self.ranks = None
        self.row = Row(name=self.row.name, role=self.row.role, why_not=why, has_failed=has_failed)

    def change(self, **fields: Any) -> None:
        """Set fields of its row."""
        self.row = self.row.model_copy(update=fields)


def measured_presets(plan: Plan, say: Say) -> Iterator[tuple[Measured, Machine]]:
    """Measure the presets in turn; the processes of a preset have ended when it is yielded, or on an exception.

    Raises RankLost for the rank that ended the run early, after what was measured until then.
    """
    floors = Ranks.started(_task(plan, plan.settings[0], FLOORS, Path()), plan.world_size, is_gpu=plan.is_gpu)
    try:
        for settings in plan.settings:
            with TemporaryDirectory(prefix="tpcompile-bench-") as folder:
                measured, machine, lost = _Preset(plan, settings, Path(folder), say).run(floors)
            yield measured, machine
            if lost is not None:
                raise lost
        floors.close()
    finally:
        floors.kill()


def _task(plan: Plan, settings: RunConfig, program: str, folder: Path, **environ: str) -> Task:
    """The task of a program's ranks; its caches are empty, so that compile seconds are those of a first compile."""
    safe = "".join(letter if letter.isalnum() or letter in "+-_." else "-" for letter in program)
    caches = folder / "caches" / safe
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    return Task(
        program=program,
        settings=settings.model_dump_json(),
        folder=str(folder),
        environ=environ,
        log=str(plan.logs / f"{settings.preset}.{safe}"),
        timeout_s=plan.timeout_s,
    )


class _Preset:
    """The programs of one preset."""

    def __init__(self, plan: Plan, settings: RunConfig, folder: Path, say: Say) -> None:
        self._plan, self._settings, self._folder, self._say = plan, settings, folder, say
        self._began = time.monotonic()
        self._is_over = False
        self._why_no_power = ""
        self._entries = []
        for name in plan.names:
            why = why_not(name, settings.block, is_gpu=plan.is_gpu, backend=settings.compile.backend)
            self._entries.append(Entry(name, Row(name=name.text, role=name.role, why_not=why)))

    def run(self, floors_ranks: Ranks) -> tuple[Measured, Machine, RankLost | None]:
        """What was measured, and the rank that ended it early. Raises RankLost when that was before the programs."""
        self._log_progress("floors and reference")
        try:
            settings = self._settings.model_dump_json()
            answer = floors_ranks.ask("floors", settings)[0]
            if any(BY_SIZE in entry.name.variants and not entry.row.why_not for entry in self._entries):
                floors_ranks.ask("tune", settings)
            floors_ranks.ask("reference", settings, str(self._folder))
        except ProgramFailed as failed:
            why = f"{failed}; see {self._plan.logs}"
            raise RankLost(FLOORS, [failed.rank], "floors", why) from None
        floors = Floors.model_validate(answer["floors"])
        lost = self._measure()
        block, train = self._settings.block, self._settings.train
        measured = Measured(
            preset=self._settings.preset,
            layers=block.num_layers,
            tokens=block.batch * block.seq_len,
            train=train,
            dtype=block.dtype,
            error_limit=self._settings.gate.error_ratio,
            floors=floors,
            bound=bound(block, floors, tp=self._plan.world_size, train=train),
            rows=tuple(entry.row for entry in self._entries),
            why_no_power=self._why_no_power,
            ended_early="" if lost is None else str(lost),
        )
        return measured, Machine(**answer["machine"], cores=os.cpu_count() or 1), lost

    def _measure(self) -> RankLost | None:
        """All steps of all programs; their processes end, and a lost rank that ended them is returned."""
        try:
            self._prepare()
            self._log_progress(f"{self._plan.rounds} rounds")
            for number in range(self._plan.rounds):
                self._step_each(self._round, in_turn(self._entries, number))
            if self._plan.is_gpu:
                self._log_progress("energy")
                self._step_each(self._power, self._entries)
            self._log_progress("profiles")
            self._step_each(self._profile, self._entries)  # last: a profiler stays in a process
            running = [entry.ranks for entry in self._entries if entry.ranks is not None]
            with ThreadPoolExecutor(len(self._entries)) as pool:
                list(pool.map(Ranks.close, running))
        except RankLost as lost:
            return lost
        finally:
            self._kill()
        return None

    def _prepare(self) -> None:
        """Compile together, then one by one the programs that time kernels; then warm up one by one."""
        waiting = [entry for entry in self._entries if not entry.row.why_not]
        with ThreadPoolExecutor(self._plan.jobs) as pool:
            futures = [pool.submit(self._compile, entry) for entry in waiting if not entry.name.is_alone]
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
            if pending:  # a rank was lost: end the others, so that their threads end
                for future in pending:
                    future.cancel()
                self._kill()
        for future in done:
            future.result()
        for entry in waiting:
            if entry.name.is_alone:
                self._compile(entry, TORCHINDUCTOR_COMPILE_THREADS=str(self._plan.cores_per_rank))
        self._step_each(self._warm, waiting)

    def _compile(self, entry: Entry, **environ: str) -> None:
        with self._failing(entry):
            task = _task(self._plan, self._settings, entry.name.text, self._folder, **environ)
            entry.ranks = Ranks.started(task, self._plan.world_size, is_gpu=self._plan.is_gpu)
            if self._is_over:
                entry.ranks.kill()
            entry.change(**entry.ranks.ask("build")[0])
            entry.change(compile_s=_largest(entry.ranks.ask("first_call"), "compile_s"))
            self._log_progress(f"{entry.name.text} is compiled")

    def _warm(self, entry: Entry, ranks: Ranks) -> None:
        answers = ranks.ask("warm")
        if entry.row.compile_s is not None:
            entry.change(compile_s=entry.row.compile_s + _largest(answers, "capture_s"))
        num_calls = round(_ROUND_MS / _largest(answers, "step_ms"))
        entry.change(
            peak_bytes=_largest(answers, "peak_bytes"),
            regions_per_call=_largest(answers, "regions_per_call"),
            calls_per_round=max(_FEWEST_CALLS, min(_MOST_CALLS, num_calls)),
            **_worst(answers),
        )

    def _round(self, entry: Entry, ranks: Ranks) -> None:
        answers = ranks.ask("round", entry.row.calls_per_round)
        entry.change(rounds_ms=(*entry.row.rounds_ms, _largest(answers, "ms")))

    def _power(self, entry: Entry, ranks: Ranks) -> None:
        """Energy of calls for as long as the counter needs, on the GPU with the lowest clock; none after a failure."""
        if self._why_no_power:
            return
        num_calls = math.ceil(_POWER_MS / entry.row.median_ms)
        answers = ranks.ask("power", num_calls)
        found = [Power.model_validate(answer["power"]) for answer in answers if "power" in answer]
        if found:
            entry.change(power=min(found, key=lambda one: one.mhz))
        else:
            self._why_no_power = f"{entry.name.text}: {answers[0]['why_not']}"

    def _profile(self, entry: Entry, ranks: Ranks) -> None:
        """Profile, and compare the outputs again after all calls."""
        answers = ranks.ask("profile")
        profiles = [Profile.model_validate(answer["profile"]) for answer in answers]
        least = min(profiles, key=lambda one: one.communication_ms or 0.0)
        before = {"error_ratio": entry.row.error_ratio, "worst": entry.row.worst}
        entry.change(profile=least, **_worst([before, *answers]))

    def _step_each(self, step: Callable[[Entry, Ranks], None], entries: Iterable[Entry]) -> None:
        """Take this step with each program that still runs; a failure is handled as in `_failing`."""
        for entry in entries:
            if entry.ranks is not None:
                with self._failing(entry):
                    step(entry, entry.ranks)

    @contextmanager
    def _failing(self, entry: Entry) -> Iterator[None]:
        """A program that fails becomes a row; a rank that is lost ends the run, unless it goes on."""
        try:
            yield
        except ProgramFailed as failed:
            entry.end(str(failed), has_failed=not failed.is_refusal)
            self._log_progress(f"{entry.name.text}: {failed}")
        except RankLost as lost:
            if self._is_over:  # ended with the others
                entry.end("", has_failed=False)
                return
            self._is_over = not self._plan.keeps_going
            entry.end(lost.why, has_failed=True)
            self._log_progress(str(lost))
            if self._is_over:
                raise

    def _kill(self) -> None:
        for entry in self._entries:
            if entry.ranks is not None:
                entry.ranks.kill()

    def _log_progress(self, text: str) -> None:
        self._say(f"{self._settings.preset} {time.monotonic() - self._began:6.1f} s: {text}")


def in_turn(entries: Sequence[T], number: int) -> Sequence[T]:
    """The entries in the order of a round, which begins with the next one each time.

    The first of a round pays for what the last of the round before has left.
    """
    start = number % len(entries)
    return [*entries[start:], *entries[:start]]


def _largest(answers: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The largest value of the ranks; None where they have none."""
    return max((answer[name] for answer in answers if answer[name] is not None), default=None)


def _worst(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = max(answers, key=lambda answer: answer["error_ratio"])
    return {"error_ratio": found["error_ratio"], "worst": found["worst"]}
