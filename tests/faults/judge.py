"""A case and the evidence of its run -> named, detected, missed, hang, ...: pure, but for `gather`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.faults.case import Case
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Divergence, Frozen, Layer, Status, UserLine, Verdict, ranks_of
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.timeline import TimelineEvent

Intervals = tuple[tuple[float, float], ...]


class Outcome(StrEnum):
    """Outcome of a case."""

    NAMED = "named"
    """Cause, ranks and the user's line are right."""
    DETECTED = "detected"
    """Red, but cause, ranks or line are wrong."""
    MISSED = "missed"
    """The job ended without a red verdict."""
    HANG = "hang"
    """The job did not end by itself."""
    GREEN = "green"
    """A healthy program ended without a red verdict."""
    FALSE_ALARM = "false alarm"
    """A healthy program got a red verdict."""
    DIED = "died before"
    """Generated: the job hung or crashed before check_ranks was called; not counted."""
    OF_PACKAGE = "of a package"
    """Generated: check_ranks is right, a package that the program uses breaks its graph on all ranks; not counted."""
    BROKEN = "broken"
    """The case itself failed: its fault was never reached, or a healthy program raised."""

    @property
    def is_right(self) -> bool:
        """True for the expected outcomes."""
        return self in (Outcome.NAMED, Outcome.GREEN, Outcome.DIED, Outcome.OF_PACKAGE)


class Evidence(Frozen):
    """What the run of a case left on disk."""

    verdict: Verdict | None = None
    verdict_at: float | None = None
    """Unix time at which the verdict was on disk."""
    reached_at: float | None = None
    """Unix time at which the first divergent rank reached its fault; None when none did."""
    compiling: tuple[Intervals, ...] = ()
    """By rank, the intervals in which it compiled."""
    is_hang: bool = False
    """The job did not end by itself."""
    codes: tuple[int, ...] = ()
    """Exit codes of the ranks, or the one of torchrun."""
    diagnose_code: int | None = None
    """Exit code of `tpcompile diagnose`."""

    @property
    def ended_well(self) -> bool:
        """All ranks ended by themselves, with 0."""
        return not self.is_hang and not any(self.codes)


class Found(Frozen):
    """The first finding of a verdict."""

    cause: Cause
    ranks: tuple[int, ...]
    """The odd ranks."""
    without_majority: tuple[int, ...] = ()
    """All ranks of the difference when no group of equal ranks has a majority: then each of them may be odd."""
    line: UserLine | None
    text: str


class Result(Frozen):
    """One row of the detection matrix."""

    name: str
    expected: str
    """The cause that must be named, empty for a healthy program."""
    outcome: Outcome
    why: str = ""
    """What is wrong; empty for an expected outcome."""
    found: Found | None = None
    seconds: float | None = None
    """Seconds from the fault to the verdict, without the compile time of the slowest rank."""
    compile_s: float = 0.0
    """Compile time of the slowest rank between fault and verdict."""
    columns: dict[str, str] = {}
    """Results of other tools on the same case."""


def gather(folder: Path, verdict: Path, **ended: Any) -> Evidence:
    """Read what a job left: its verdict, when the fault acted (reached_N.json), and the sentinel's timelines.

    `ended` are the fields of `Evidence` that say how it ended.
    """
    verdict_at = verdict.stat().st_mtime if verdict.exists() else None
    reached = [float(json.loads(found.read_text())) for found in folder.glob("reached_*.json")]
    timelines = [json.loads(found.read_text()) for found in sorted(folder.glob("run/rank_*/timeline.json"))]
    return Evidence(
        verdict=Verdict.model_validate_json(verdict.read_text()) if verdict_at else None,
        verdict_at=verdict_at,
        reached_at=min(reached, default=None),
        compiling=tuple(compile_intervals(t, end=verdict_at) for t in timelines) if verdict_at else (),
        **ended,
    )


def judge(case: Case, evidence: Evidence) -> Result:
    """The row of a case."""
    found = first_finding(evidence.verdict) if evidence.verdict else None
    outcome, why = _outcome(case, evidence, found)
    # At a hang, the verdict is about our own kill.
    seconds, compile_s = (None, 0.0) if evidence.is_hang else time_to_verdict(evidence)
    return Result(
        name=case.name,
        expected=case.cause.value if case.cause else "",
        outcome=outcome,
        why=why,
        found=found,
        seconds=seconds,
        compile_s=compile_s,
    )


def _outcome(case: Case, evidence: Evidence, found: Found | None) -> tuple[Outcome, str]:
    if evidence.is_hang:
        said = f", although it reported: {found.text}" if found else ""
        return Outcome.HANG, f"had not ended after {case.limit_s:g} s{said}"
    if case.cause is None:
        return _healthy(evidence, found)
    if evidence.reached_at is None:
        return Outcome.BROKEN, f"no rank reached the fault; exit code {_code(evidence)}"
    if found is None:
        return Outcome.MISSED, f"no red verdict; exit code {_code(evidence)}"
    wrong = differences(case, found)
    return (Outcome.DETECTED, "; ".join(wrong)) if wrong else (Outcome.NAMED, "")


def _healthy(evidence: Evidence, found: Found | None) -> tuple[Outcome, str]:
    if found is not None:
        return Outcome.FALSE_ALARM, found.text
    if not evidence.ended_well:
        return Outcome.BROKEN, f"a healthy program ended with exit code {_code(evidence)}"
    return Outcome.GREEN, ""


def _code(evidence: Evidence) -> str:
    return ", ".join(map(str, evidence.codes))


def differences(case: Case, found: Found) -> list[str]:
    """What is wrong in a finding; empty when it names the case."""
    wrong = []
    if found.cause != case.cause:
        expected = case.cause.value if case.cause else "nothing"
        wrong.append(f"cause is {found.cause.value!r}, not {expected!r}")
    if sorted(found.ranks) != sorted(case.blamed):
        blamed = ranks_text(found.ranks) or "none"
        wrong.append(f"blames rank {blamed}, not {ranks_text(case.blamed)}")
    if case.marker and not _is_blamed(case, found.line):
        expected = f"{case.source.name}:{ranks_text(case.blamed_lines())}"
        wrong.append(f"line is {_line_text(found.line)}, not {expected}")
    return wrong


def _line_text(line: UserLine | None) -> str:
    return "no line" if line is None else f"{line} {line.code.strip()!r}"


def _is_blamed(case: Case, line: UserLine | None) -> bool:
    return (
        line is not None
        and line.file.endswith(f"{case.source.parent.name}/{case.source.name}")
        and line.line in case.blamed_lines()
    )


def first_finding(verdict: Verdict) -> Found | None:
    """The finding that a reader sees first; an environment difference comes last. None for a green verdict."""
    red = [divergence for divergence in verdict.divergences if divergence.is_red]
    of_program = find(red, lambda divergence: divergence.layer != Layer.ENVIRONMENT)
    if of_program is not None:
        return _of_divergence(of_program)
    failed = [check for check in verdict.checks if check.status == Status.FAIL]
    if failed:
        check = min(failed, key=lambda check: check.cause == Cause.UNKNOWN)
        text = f"{check.name}: {check.observed}"
        return Found(cause=check.cause, ranks=check.ranks, line=check.line, text=text)
    return _of_divergence(red[0]) if red else None


def _of_divergence(divergence: Divergence) -> Found:
    """Blames all ranks outside of the first group, which has the most ranks, or the lowest without a majority."""
    return Found(
        cause=divergence.cause,
        ranks=ranks_of(divergence.groups[1:]),
        without_majority=() if divergence.has_majority else divergence.ranks,
        line=divergence.line,
        text=divergence.title,
    )


def time_to_verdict(evidence: Evidence) -> tuple[float | None, float]:
    """(seconds from fault to verdict without compile time, compile time of the slowest rank between them)."""
    if evidence.reached_at is None or evidence.verdict_at is None:
        return None, 0.0
    begin, end = evidence.reached_at, evidence.verdict_at
    compile_s = max((covered_s(intervals, begin, end) for intervals in evidence.compiling), default=0.0)
    return max(0.0, end - begin - compile_s), compile_s


def covered_s(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of [begin, end] that the union of the intervals covers."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total, reached = total + stop - start, stop
    return total


def compile_intervals(timeline: Sequence[tuple[float, str, str]], *, end: float) -> Intervals:
    """`Sentinel.timeline` of a rank -> intervals in which it compiled; a compile that did not end lasts until `end`."""
    started: dict[str, float] = {}
    found = []
    for at, event, compile_id in timeline:
        if event == TimelineEvent.COMPILE_STARTS:
            started[compile_id] = at
        if event == TimelineEvent.COMPILE_ENDS and compile_id in started:
            found.append((started.pop(compile_id), at))
    unfinished = [(start, end) for start in started.values()]
    return tuple(sorted(found + unfinished))
