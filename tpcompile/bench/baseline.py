"""A report that was good -> what a later one must not exceed: counts of a step, and times as multiples.

One file for all GPUs: a case is a device, a torch release, a number of ranks and a preset in its form. Times differ
between machines, so they are multiples of mode A and of the floor of the same run; they also vary from run to run, so
they only warn, unless `--fail-on-times` is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tpcompile.bench.ratios import ratios_of
from tpcompile.bench.records import Measured, Report, Role, Row
from tpcompile.errors import ConfigError
from tpcompile.evidence.records.base import Frozen
from tpcompile.fusion import record_files
from tpcompile.fusion.diff import Change

BASELINE_VERSION = 2
"""1 had multiples of a floor by the rate of a copy, which programs could beat."""
TOLERANCE = 0.1
"""Times may grow by this share: ratios of one machine move by a few percent between runs."""


class Figures(Frozen):
    """What one step of a program takes."""

    regions: float | None
    kernels: int | None
    """None on CPU."""
    launches: int | None
    of_a: float | None
    """Multiple of the time of mode A; None where A is not in the run."""
    of_floor: float | None


class Case(Frozen):
    """The figures of all programs in one setting: a machine, a torch release and a form of a preset."""

    device: str
    torch: str
    """Release, without the build."""
    world_size: int
    preset: str
    layers: int
    tokens: int
    train: bool
    made_with: str
    """The command."""
    programs: dict[str, Figures]

    @property
    def key(self) -> tuple[object, ...]:
        """All fields that say which setting this is."""
        return tuple(value for name, value in self if name not in ("made_with", "programs"))

    @property
    def title(self) -> str:
        """The setting as a phrase of a message."""
        kind = "forward and backward" if self.train else "forward"
        where = f"{self.device}, torch {self.torch}, {self.world_size} ranks"
        return f"{where}, {self.preset}, {self.layers} layers, {self.tokens} tokens, {kind}"


class Baseline(Frozen):
    """The committed file."""

    schema_version: int = BASELINE_VERSION
    cases: tuple[Case, ...] = ()

    @property
    def programs(self) -> list[str]:
        """The programs of all cases, and mode A, since their times are multiples of its time."""
        named = (name for case in self.cases for name in case.programs)
        return list(dict.fromkeys(("A", *named)))


class Regression(Frozen):
    """One program that exceeds its figures."""

    program: str
    change: Change
    says: str
    is_time: bool = False
    """A time, which only warns unless asked."""


def read(path: Path) -> Baseline:
    """Raises ConfigError for a file that does not exist, is no baseline, or has an older version."""
    made_by = "tpcompile bench --write-baseline FILE"
    return record_files.read(Baseline, path, version=BASELINE_VERSION, made_by=made_by)


def written(baseline: Baseline, report: Report) -> Baseline:
    """The baseline with the cases of the report in place of those of the same key.

    Raises ConfigError for a run that ended early.
    """
    made = [_case(measured, report) for measured in report.measured]
    cases = {case.key: case for case in (*baseline.cases, *made)}
    return Baseline(cases=tuple(sorted(cases.values(), key=lambda case: json.dumps(case.key))))


def regressions(baseline: Baseline, measured: Measured, report: Report) -> Iterator[Regression]:
    """Compare each program of the baseline in this preset; yield the first change that explains the others, if any.

    Raises ConfigError where the baseline has no case for the preset, or the run none of its programs.
    """
    now = _case(measured, report)
    case = next((one for one in baseline.cases if one.key == now.key), None)
    if case is None:
        known = "; ".join(one.title for one in baseline.cases) or "nothing"
        raise ConfigError(f"no baseline for {now.title}; it has {known}. Add this one with --write-baseline")
    rows = {row.name: row for row in measured.rows if row.name in case.programs}
    if not rows:
        raise ConfigError(f"nothing of {case.title} is in this run; it has {', '.join(case.programs)}")
    for name, row in rows.items():
        if not row.rounds_ms or measured.differs(row):
            why = row.why_not or "outputs differ"
            yield Regression(program=name, change=Change.OVERHEAD, says=f"not measured: {why}")
        else:
            yield from _regression(name, case.programs[name], _figures(measured, row))


def _regression(name: str, allowed: Figures, now: Figures) -> Iterator[Regression]:
    """Yield at most one, by cause: more regions, more kernels, more launches of as many kernels, more time."""
    counts = (
        (Change.OVERHEAD, "compiled regions a call", allowed.regions, now.regions),
        (Change.FUSION, "kernels a step", allowed.kernels, now.kernels),
        (Change.OVERHEAD, "launches of the host a step", allowed.launches, now.launches),
    )
    for change, what, before, after in counts:
        if before is not None and (after is None or after > before):
            seen = "an unknown number of" if after is None else f"{after:g}"
            yield Regression(program=name, change=change, says=f"{before:g} -> {seen} {what}")
            return
    slower = []
    times = (("of mode A", allowed.of_a, now.of_a), ("of the floor", allowed.of_floor, now.of_floor))
    for what, before, after in times:
        if before is not None and after is not None and after > before * (1 + TOLERANCE):
            slower.append(f"{before:.3g} -> {after:.3g} {what}")
    if slower:
        yield Regression(program=name, change=Change.CHOICE, says=f"time {', '.join(slower)}", is_time=True)


def _case(measured: Measured, report: Report) -> Case:
    """The figures of our programs that were measured. Raises ConfigError for a run that ended early."""
    machine = report.machine
    if machine is None or any(one.ended_early for one in report.measured):
        raise ConfigError("a baseline needs a whole run, and this one ended early")
    ours = [row for row in measured.rows if row.rounds_ms and row.role is Role.OURS]
    return Case(
        device=machine.device,
        torch=machine.torch.partition("+")[0],
        world_size=report.world_size,
        preset=measured.preset,
        layers=measured.layers,
        tokens=measured.tokens,
        train=measured.train,
        made_with=report.command,
        programs={row.name: _figures(measured, row) for row in ours},
    )


def _figures(measured: Measured, row: Row) -> Figures:
    ratios = ratios_of(measured, row)
    return Figures(
        regions=row.regions_per_call,
        kernels=row.profile.kernels,
        launches=row.profile.launches,
        of_a=None if ratios.faster_than_a is None else round(1 / ratios.faster_than_a, 4),
        of_floor=None if ratios.of_floor is None else round(ratios.of_floor, 3),
    )
