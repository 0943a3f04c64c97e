"""Cases and routes -> rows: writes each program, runs it, reads what the route left, judges."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.drawn.plan import PROGRAM_FILE, Drawn
from tests.faults.judge import Evidence, Judged, described, gather, judge, time_to_verdict
from tests.faults.names import AFTER, CHECKED, DIAGNOSED, REACHED, RUN, TRACE, Route
from tests.faults.run import FEW_THREADS, Ended, Launch, finished

_STUCK_S = 5.0
"""Without the tool a job that hangs is ended after so many idle seconds."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case on one route."""

    case: Drawn
    route: Route
    judged: Judged
    evidence: Evidence
    wall_s: float

    @property
    def times(self) -> tuple[float | None, float]:
        """Seconds from the fault to the sentinel's verdict without compile time, and that compile time."""
        return time_to_verdict(self.evidence) if self.route == Route.SENTINEL else (None, 0.0)

    @property
    def replay(self) -> str:
        """Command that runs it again."""
        return f"scripts/generated_faults.py {self.case.replay} --routes {self.route} --keep runs/generated"

    def as_json(self) -> dict[str, Any]:
        """Fields for the results."""
        seconds, compile_s = self.times
        return {
            "seed": self.case.seed,
            "program": self.case.program.name,
            "operator": self.case.operator.name,
            "route": self.route.value,
            "world_size": self.case.world_size,
            "rank": self.case.rank,
            "step": self.case.step,
            "backend": self.case.backend,
            "trace": self.case.truth.trace.value,
            "outcome": self.judged.outcome.value,
            "wrong": list(self.judged.wrong),
            "said": described(self.judged),
            "ended_well": self.evidence.ended_well,
            "seconds": seconds,
            "compile_s": round(compile_s, 2),
        }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a sweep runs."""

    routes: tuple[Route, ...]
    directory: Path
    caches: Path
    """Folder for Inductor's C++, kept from sweep to sweep."""
    jobs: int = 2
    keep: bool = False
    is_nccl: bool = False


def sweep(cases: Sequence[Drawn], settings: Settings, *, report: Callable[[Row], None]) -> list[Row]:
    """Run all cases on all routes; each row is reported as it comes."""
    rows: list[Row] = []
    running: dict[Launch, tuple[Drawn, Route]] = {}

    def launches() -> Iterator[Launch]:
        for case in cases:
            for route in settings.routes:
                if route not in case.operator.not_asked:
                    launch = _launch(case, route, settings)
                    running[launch] = (case, route)
                    yield launch

    # Parallel runs have caches of their own: a lock is idle time.
    slots = [{"TORCHINDUCTOR_CACHE_DIR": str(settings.caches / str(slot))} for slot in range(settings.jobs)]
    for launch, ended in finished(launches(), slots):
        case, route = running.pop(launch)
        row = _row(case, route, launch.out, ended)
        rows.append(row)
        report(row)
        if not settings.keep:
            shutil.rmtree(launch.out, ignore_errors=True)
    return rows


def _launch(case: Drawn, route: Route, settings: Settings) -> Launch:
    out = settings.directory / f"{case.name}-{route}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    program = out / PROGRAM_FILE
    program.write_text(case.source.text)
    is_watched = route == Route.SENTINEL
    is_traced = route == Route.DIAGNOSE
    read_by_frame = {
        "route": route.value,
        "backend": case.backend,
        "num_steps": case.num_steps,
        "device": "cuda" if settings.is_nccl else "cpu",
        "options": case.options,
        "out": str(out),
    }
    trace = {"TORCH_TRACE": str(out / TRACE)} if is_traced else {}
    return Launch(
        out=out,
        command=(str(program),),
        world_size=case.world_size,
        limit_s=case.limit_s,
        by="exec" if settings.is_nccl else "fork",
        environ={**FEW_THREADS, **trace, "GENERATED_SETTINGS": json.dumps(read_by_frame)},
        stuck_s=None if is_watched or case.truth.is_healthy else _STUCK_S,
        reached=REACHED.format(rank="*"),
        after=_diagnose(out, case.world_size) if is_traced else (),
        if_ended_badly=("--ended-badly",),
    )


def _diagnose(out: Path, world_size: int) -> tuple[str, ...]:
    command = [sys.executable, "-m", "tpcompile", "diagnose", str(out / TRACE), "--json", str(out / DIAGNOSED)]
    return (*command, "--world-size", str(world_size))


def _row(case: Drawn, route: Route, out: Path, ended: Ended) -> Row:
    verdicts = {Route.SENTINEL: out / RUN / "verdict.json", Route.CHECK_RANKS: out / CHECKED}
    after = out / AFTER
    evidence = gather(
        out,
        verdicts.get(route, out / DIAGNOSED),
        is_hang=ended.is_hang,
        codes=tuple(ended.codes.values()),
        diagnose_code=json.loads(after.read_text()) if after.exists() else None,
    )
    judged = judge(case.truth, evidence, route)
    return Row(case=case, route=route, judged=judged, evidence=evidence, wall_s=ended.wall_s)
