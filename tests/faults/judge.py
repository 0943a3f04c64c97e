"""What is right for a case, and what its run left -> named, detected, missed, hang, ...: pure, but for `gather`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from tests.faults.case import Trace, Truth
from tests.faults.names import Route
from tpcompile.errors import ExitCode
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import CheckId, Divergence, Frozen, Layer, Status, UserLine, Verdict, ranks_of
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.lines import is_installed
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


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The outcome of a case on a route."""

    outcome: Outcome
    wrong: tuple[str, ...] = ()
    """Which of cause, rank and line is wrong, or what else is."""
    found: Found | None = None


def judge(truth: Truth, evidence: Evidence, route: Route = Route.SENTINEL) -> Judged:
    """Compare what a route left with the verdicts that are right."""
    found = first_finding(evidence.verdict) if evidence.verdict else None
    if route == Route.SENTINEL and evidence.is_hang:
        return Judged(outcome=Outcome.HANG, found=found)
    if truth.is_healthy:
        return _healthy(route, evidence, found)
    if evidence.reached_at is None:
        return Judged(outcome=Outcome.BROKEN, wrong=("the fault was never reached",), found=found)
    return _faulty(truth, route, evidence, found)


def _faulty(truth: Truth, route: Route, evidence: Evidence, found: Found | None) -> Judged:
    if route == Route.CHECK_RANKS and evidence.verdict is None:
        return Judged(outcome=Outcome.DIED)
    if route != Route.SENTINEL and truth.trace == Trace.ABSENT:
        return _not_compiled(route, evidence, found)
    if found is None:
        is_named = route == Route.DIAGNOSE and _lacks_log(truth, evidence)
        return Judged(outcome=Outcome.NAMED if is_named else Outcome.MISSED)
    wrong = differences(truth, found)
    return Judged(outcome=Outcome.DETECTED if wrong else Outcome.NAMED, wrong=tuple(wrong), found=found)


def _healthy(route: Route, evidence: Evidence, found: Found | None) -> Judged:
    if found is not None:
        is_of_package = route == Route.CHECK_RANKS and _is_of_package(found, evidence)
        return Judged(outcome=Outcome.OF_PACKAGE if is_of_package else Outcome.FALSE_ALARM, found=found)
    if route == Route.DIAGNOSE and evidence.diagnose_code != 0:
        return Judged(outcome=Outcome.FALSE_ALARM)
    if not evidence.ended_well:
        return Judged(outcome=Outcome.BROKEN, wrong=("a healthy program failed",))
    return Judged(outcome=Outcome.GREEN)


def _is_of_package(found: Found, evidence: Evidence) -> bool:
    """True for a graph break on all ranks inside an installed package: some versions of transformers have one."""
    assert evidence.verdict is not None
    is_everywhere = len(found.ranks) == evidence.verdict.world_size
    is_break = found.cause == Cause.GRAPH_BREAK
    return is_break and is_everywhere and found.line is not None and is_installed(found.line)


def _lacks_log(truth: Truth, evidence: Evidence) -> bool:
    """True when the verdict is that this rank left no log: it never compiled anything, or its log is lost."""
    if evidence.verdict is None or evidence.diagnose_code != ExitCode.INCOMPLETE or not truth.without_log:
        return False
    checks = [check for check in evidence.verdict.checks if check.id == CheckId.LOGS_COMPLETE]
    return any(check.ranks == truth.without_log for check in checks)


def _not_compiled(route: Route, evidence: Evidence, found: Found | None) -> Judged:
    """A fault that no compile shows: no verdict may be red, and diagnose reports a job that ended badly."""
    if found is not None:
        return Judged(outcome=Outcome.DETECTED, wrong=("it is not in what was compiled",), found=found)
    if route != Route.DIAGNOSE or evidence.ended_well:
        return Judged(outcome=Outcome.NAMED)
    if evidence.diagnose_code != ExitCode.INCOMPLETE:
        return Judged(outcome=Outcome.MISSED, wrong=(f"exit code {evidence.diagnose_code}",))
    return Judged(outcome=Outcome.NAMED)


def differences(truth: Truth, found: Found) -> list[str]:
    """Which of cause, rank and line a finding has wrong."""
    wrong = []
    if found.cause.name.lower() not in truth.causes:
        wrong.append("cause")
    if not _blamed_ranks(truth, found).intersection(truth.ranks):
        wrong.append("rank")
    if truth.lines is not None and not _is_on(truth, found.line):
        wrong.append("line")
    return wrong


def _is_on(truth: Truth, line: UserLine | None) -> bool:
    if line is None or truth.lines is None:
        return False
    is_on_line = line.file.endswith(f"/{truth.source}") and line.line in truth.lines
    return is_on_line or PurePath(line.file).name == truth.file


def _blamed_ranks(truth: Truth, found: Found) -> set[frozenset[int]]:
    """Sets of ranks that a finding may blame: the odd ranks, and without a majority all ranks that differ."""
    odd, without_majority = frozenset(found.ranks), frozenset(found.without_majority)
    return {odd} if truth.is_majority_needed or not without_majority else {odd, without_majority}


def described(judged: Judged) -> str:
    """What was found, in one line."""
    if judged.found is None:
        return "; ".join(judged.wrong)
    found = judged.found
    ranks = ranks_text(found.ranks) or "none"
    line = f"{PurePath(found.line.file).name}:{found.line.line}" if found.line else "no line"
    text = f"{found.cause.name.lower()}, rank {ranks}, {line}: {found.text}"
    return f"{', '.join(judged.wrong)} wrong; {text}" if judged.wrong else text


def first_finding(verdict: Verdict) -> Found | None:
    """The finding that a reader sees first; an environment difference comes last. None for a green verdict.

    A branch is left out, which leads where lines were recorded: a case says what came of it.
    """
    red = [divergence for divergence in verdict.divergences if divergence.is_red]
    of_program = find(red, lambda divergence: divergence.layer != Layer.ENVIRONMENT)
    if of_program is not None:
        return _of_divergence(of_program)
    failed = [check for check in verdict.checks if check.status == Status.FAIL]
    failed = [check for check in failed if check.id != CheckId.SAME_BRANCHES] or failed
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
    # At a hang, the verdict is about our own kill.
    if evidence.is_hang or evidence.reached_at is None or evidence.verdict_at is None:
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
