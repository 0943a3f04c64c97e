"""A report that was good -> what a later one must not exceed: counts of a step, and times as multiples.

One file for all GPUs: a case is a device, a torch release, a number of ranks and a preset in its form. Times differ
between machines, so they are multiples of mode A and of the floor of the same run; they also vary from run to run, so
they only warn, unless `--fail-on-times` is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpcompile.bench.ratios import differs, ratios_of
from tpcompile.bench.records import Measured, Report, Role, Row
from tpcompile.errors import ConfigError
from tpcompile.evidence.records.base import Frozen
from tpcompile.evidence.records.reader import read_record
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
    is_time: bool
    """A time, which only warns unless asked."""

    @property
    def text(self) -> str:
        """In one line: the program, the class of the change, the numbers."""
        return f"{self.program}: {self.change}: {self.says}"


def read(path: Path) -> Baseline:
    """Raises ConfigError for a file that does not exist, is no baseline, or has an older version."""
    try:
        found = read_record(Baseline, path)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; make it with `tpcompile bench --write-baseline {path}`") from None
    if found.schema_version != BASELINE_VERSION:
        raise ConfigError(
            f"{path} has version {found.schema_version}, whose floors are not those of version {BASELINE_VERSION}; "
            f"measure it again with `tpcompile bench --write-baseline` and a new file"
        )
    return found


def written(baseline: Baseline, report: Report) -> Baseline:
    """The baseline with the cases of the report in place of those of the same key.

    Raises ConfigError for a run that ended early.
    """
    cases = {case.key: case for case in baseline.cases}
    for measured in report.measured:
        found = _case(measured, report)
        cases[found.key] = found
    return Baseline(cases=tuple(sorted(cases.values(), key=lambda case: json.dumps(case.key))))


def case_of(baseline: Baseline, measured: Measured, report: Report) -> Case:
    """The case of the baseline for a preset of the report. Raises ConfigError where there is none."""
    here = _case(measured, report)
    for case in baseline.cases:
        if case.key == here.key:
            return case
    known = "; ".join(case.title for case in baseline.cases) or "nothing"
    raise ConfigError(f"no baseline for {here.title}; it has {known}. Add this one with --write-baseline")


def regressions(case: Case, measured: Measured) -> Iterator[Regression]:
    """For each program of the case that is in this run, the first change that explains the others, if there is one.

    Raises ConfigError where none of the programs is in the run.
    """
    rows = {row.name: row for row in measured.rows if row.name in case.programs}
    if not rows:
        raise ConfigError(f"nothing of {case.title} is in this run; it has {', '.join(case.programs)}")
    for name, row in rows.items():
        allowed = case.programs[name]
        if not row.rounds_ms or differs(row, measured.error_limit):
            why = row.why_not or "outputs differ"
            yield Regression(program=name, change=Change.OVERHEAD, says=f"not measured: {why}", is_time=False)
            continue
        found = _regression(name, allowed, _figures(measured, row))
        if found is not None:
            yield found


def _regression(name: str, allowed: Figures, now: Figures) -> Regression | None:
    """By cause: more regions, then more kernels, then more launches of as many kernels, then time alone."""
    counts: Sequence[tuple[Change, str, float | None, float | None]] = (
        (Change.OVERHEAD, "compiled regions a call", allowed.regions, now.regions),
        (Change.FUSION, "kernels a step", allowed.kernels, now.kernels),
        (Change.OVERHEAD, "launches of the host a step", allowed.launches, now.launches),
    )
    for change, what, before, after in counts:
        if before is not None and (after is None or after > before):
            seen = "an unknown number of" if after is None else f"{after:g}"
            return Regression(program=name, change=change, says=f"{before:g} -> {seen} {what}", is_time=False)
    times = (("of mode A", allowed.of_a, now.of_a), ("of the floor", allowed.of_floor, now.of_floor))
    slower = [
        f"{before:.3g} -> {after:.3g} {what}"
        for what, before, after in times
        if before is not None and after is not None and after > before * (1 + TOLERANCE)
    ]
    if not slower:
        return None
    return Regression(program=name, change=Change.CHOICE, says=f"time {', '.join(slower)}", is_time=True)


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
    faster = ratios.faster_than_a.value
    return Figures(
        regions=row.regions_per_call,
        kernels=row.profile.kernels,
        launches=row.profile.launches,
        of_a=None if faster is None else round(1 / faster, 4),
        of_floor=None if ratios.of_floor.value is None else round(ratios.of_floor.value, 3),
    )
