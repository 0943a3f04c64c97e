"""Reports and exits of the ranks in one phase of a test -> its failures: one per cause, with the ranks that have it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.pytest_plugin.files import IS_LOST_PEER


@dataclass
class RankEnd:
    """How a rank ended, or what is known of one that still runs."""

    rank: int
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reports by phase of the test: setup, call, teardown."""
    error: str = ""
    """Why pytest could not run the test on this rank: a predicate, as in `cannot collect the test`."""
    exit_code: int | None = None
    is_late: bool = False
    """Stopped at the limit of the test."""
    is_stopped: bool = False
    """Stopped because a different rank had failed and this rank did not end by itself."""
    stack: str = ""
    """Stack of a rank that was stopped, innermost frame first."""
    unreported: dict[str, str] = field(default_factory=dict)
    """Output after the last report, by stream."""

    @property
    def has_called(self) -> bool:
        """True when this rank does not run the body of the test any more."""
        return self.exit_code is not None or "call" in self.reports or not self.is_set_up

    @property
    def is_set_up(self) -> bool:
        """False when the setup of the test failed or skipped it."""
        return self.reports.get("setup", {}).get("outcome") in (None, "passed")

    @property
    def is_over(self) -> bool:
        """True when this rank has reported the whole test, and its process ended well."""
        return "teardown" in self.reports and self.exit_code == 0

    @property
    def has_failed(self) -> bool:
        """True when this rank has ended the test without passing it."""
        outcomes = {report["outcome"] for report in self.reports.values()}
        return bool(self.error) or bool(outcomes - {"passed"}) or self.has_died

    @property
    def has_died(self) -> bool:
        """True when the process ended before the test did, without being stopped."""
        is_explained = self.is_late or self.is_stopped or bool(self.error)
        return self.exit_code is not None and not self.is_over and not is_explained


Section = tuple[str, str]


@dataclass(frozen=True)
class Failure:
    """One cause of a failed test."""

    ranks: tuple[int, ...]
    report: dict[str, Any] | None = None
    """Report of the first of these ranks, as JSON; None for a rank that did not report."""
    text: str = ""
    """What is wrong, when there is no report."""
    notes: tuple[Section, ...] = ()
    """Sections of the report besides the captured output."""
    is_by_sentinel: bool = False
    """True when a sentinel ended the ranks; `text` is then its verdict."""


@dataclass(frozen=True)
class Phase:
    """What the ranks did in one phase of a test."""

    when: str
    ends: Sequence[RankEnd]
    stopped_by: str = ""
    """Verdict of a sentinel that ended ranks in this test."""

    @property
    def reports(self) -> dict[int, dict[str, Any]]:
        """Reports of the ranks that have one, by rank."""
        return {end.rank: end.reports[self.when] for end in self.ends if self.when in end.reports}

    def with_outcome(self, outcome: str) -> dict[int, dict[str, Any]]:
        """Reports of the ranks with that outcome, by rank."""
        return {rank: report for rank, report in self.reports.items() if report["outcome"] == outcome}

    @property
    def has_lost_rank(self) -> bool:
        """True when a rank died or was stopped during the test."""
        return any(end.has_died or end.is_stopped or end.is_late for end in self.ends)

    @property
    def ended_in_it(self) -> list[RankEnd]:
        """Ranks whose process ended before they reported this phase."""
        return [end for end in self.ends if _unfinished_phase(end) == self.when]


def _unfinished_phase(end: RankEnd) -> str:
    """The first phase that a rank did not report; empty for a rank that reported all phases and ended well."""
    if end.is_over:
        return ""
    if "setup" not in end.reports:
        return "setup"
    is_called = end.is_set_up and "call" not in end.reports
    return "call" if is_called else "teardown"


def failures(phase: Phase) -> list[Failure]:
    """The causes of a failed phase, in order of the ranks; empty when no rank has a failure of its own."""
    failed = phase.with_outcome("failed")
    own = {rank: report for rank, report in failed.items() if not _is_consequence(report, phase)}
    groups = grouped(own, lambda rank: _cause(own[rank]))
    found = []
    for ranks in groups.values():
        messages = {rank: message(own[rank]) for rank in ranks}
        others = [rank for rank in ranks if messages[rank] != messages[ranks[0]]]
        notes = [(f"On rank {rank}", messages[rank]) for rank in others]
        found.append(Failure(tuple(ranks), own[ranks[0]], notes=tuple(notes)))
    found += _unreported(phase, is_explained=bool(found))
    found.sort(key=lambda failure: failure.ranks)
    if not found:
        return []
    waiting = []
    for end in phase.ended_in_it:
        if end.is_stopped:
            title = f"Rank {end.rank} had not finished and was stopped, at {where(end.stack)}"
            waiting.append((title, own_frames(end.stack)))
    first = replace(found[0], notes=(*found[0].notes, *waiting))
    return [first, *found[1:]]


# Ranks that reported


def _is_consequence(report: dict[str, Any], phase: Phase) -> bool:
    """True for a lost connection to a rank that was lost, and for a pass of an xfail test that failed elsewhere."""
    is_unexpected_pass = str(report["longrepr"]).startswith("[XPASS(strict)]")
    if is_unexpected_pass:
        has_xfailed = any("wasxfail" in skipped for skipped in phase.with_outcome("skipped").values())
        return phase.has_lost_rank or has_xfailed
    return phase.has_lost_rank and bool(report.get(IS_LOST_PEER))


def _cause(report: dict[str, Any]) -> tuple[object, ...]:
    """Key of a failure: exceptions of one type with one traceback are one cause, whatever their messages say."""
    longrepr = report["longrepr"]
    if not isinstance(longrepr, dict):
        return (str(longrepr),)
    crash = longrepr["reprcrash"] or {}
    kind = re.match(r"[\w.]*", message(report))
    entries = [entry["data"].get("reprfileloc") for entry in longrepr["reprtraceback"]["reprentries"]]
    lines = [(entry["path"], entry["lineno"]) for entry in entries if entry]
    return (crash.get("path"), crash.get("lineno"), kind and kind[0], *lines)


def message(report: dict[str, Any]) -> str:
    """The message of an exception, or the text of a failure without one."""
    longrepr = report["longrepr"]
    if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
        return str(longrepr["reprcrash"]["message"])
    return str(longrepr)


# Ranks that did not report


def _unreported(phase: Phase, *, is_explained: bool) -> list[Failure]:
    """Failures of ranks that died, could not run the test, or ran until its limit.

    Ranks that a sentinel ended are left out when a report explains the failure.
    """
    ended = phase.ended_in_it
    died = [end for end in ended if end.has_died]
    stopped = [end for end in died if end.exit_code == 1] if phase.stopped_by else []
    unable = grouped([end for end in ended if end.error], lambda end: end.error)
    by_code = grouped([end for end in died if end not in stopped], lambda end: end.exit_code)
    found = []
    for why, ends in unable.items():
        found.append(Failure(_ranks(ends), text=f"{named_ranks(_ranks(ends))} {why}"))
    for code, ends in by_code.items():
        how = f"died with exit code {code}"
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
        text = f"{named_ranks(_ranks(ends))} {how} in the {phase.when} of the test"
        found.append(Failure(_ranks(ends), text=text))
    found += _late(phase)
    if stopped and not is_explained:
        found.append(Failure(_ranks(stopped), text=phase.stopped_by, is_by_sentinel=True))
    return found


def _late(phase: Phase) -> list[Failure]:
    late = [end for end in phase.ended_in_it if end.is_late]
    if not late:
        return []
    lines = [f"{named_ranks(_ranks(late))} did not finish the {phase.when} of the test in time"]
    stacks = []
    for end in late:
        lines.append(f"rank {end.rank} is at {where(end.stack)}")
        stacks.append((f"Stack of rank {end.rank}, innermost frame first", own_frames(end.stack)))
    return [Failure(_ranks(late), text="\n".join(lines), notes=tuple(stacks))]


def _ranks(ends: Sequence[RankEnd]) -> tuple[int, ...]:
    return tuple(end.rank for end in ends)


# Stacks

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+)(?: in (?P<function>.*))?')
_OF_LIBRARIES = ("/site-packages/", "/lib/python3", "<frozen", "/tpcompile/pytest_plugin/")


def own_frames(stack: str) -> str:
    """The frames of the test in a stack, innermost first; without those of pytest."""
    lines = [line.strip() for line in stack.splitlines() if _FRAME.search(line)]
    ends = [number for number, line in enumerate(lines) if "/_pytest/python.py" in line]
    return "\n".join(lines[: ends[0]] if ends else lines)


def where(stack: str) -> str:
    """`file:line in function` of the innermost frame outside of libraries, or of the innermost frame."""
    frames = list(_FRAME.finditer(own_frames(stack)))
    if not frames:
        return "an unknown line"
    own = [frame for frame in frames if not any(part in frame["file"] for part in _OF_LIBRARIES)]
    frame = [*own, *frames][0]
    return f"{frame['file']}:{frame['line']} in {frame['function']}"
