"""Failures of the ranks in one phase of a test -> one cause each, with the ranks that have it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.pytest_plugin.ends import RankEnd
from tpcompile.pytest_plugin.files import IS_LOST_PEER

Section = tuple[str, str]


@dataclass(frozen=True)
class Failure:
    """One cause of a failed test."""

    ranks: tuple[int, ...]
    report: dict[str, Any] | None = None
    """Report of the first of these ranks, as JSON; None for a rank that did not report."""
    text: str = ""
    """What is wrong, where there is no report."""
    notes: tuple[Section, ...] = ()
    """Sections of the report beside the captured output."""


@dataclass(frozen=True)
class Phase:
    """What the ranks did in one phase of a test."""

    when: str
    ends: Sequence[RankEnd]
    stopped_by: str = ""
    """Verdict of a sentinel that ended ranks in this test."""
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, when: str, ends: Sequence[RankEnd], stopped_by: str) -> Phase:
        """The phase of that name."""
        return cls(when, ends, stopped_by, {end.rank: end.reports[when] for end in ends if when in end.reports})

    @property
    def ended_in_it(self) -> list[RankEnd]:
        """Ranks whose process ended before they reported this phase."""
        return [end for end in self.ends if _unfinished_phase(end) == self.when]


def _unfinished_phase(end: RankEnd) -> str:
    """The phase that a rank did not report; empty for one that has reported all, or had nothing to do in it."""
    if end.exit_code == 0 and "teardown" in end.reports:
        return ""
    is_set_up = end.reports.get("setup", {}).get("outcome") in (None, "passed")
    phases = ("setup", "call", "teardown") if is_set_up else ("setup", "teardown")
    return next((when for when in phases if when not in end.reports), "teardown")


def failures(phase: Phase) -> list[Failure]:
    """The causes of a failed phase, in order of the ranks; empty when no rank has a failure of its own."""
    reported = _reported(phase)
    found = [*reported, *_unreported(phase, is_explained=bool(reported))]
    found.sort(key=lambda failure: failure.ranks)
    waiting = tuple(_waiting(end) for end in phase.ended_in_it if end.is_stopped)
    if found and waiting:
        found[0] = Failure(found[0].ranks, found[0].report, found[0].text, (*found[0].notes, *waiting))
    return found


# Ranks that reported


def _reported(phase: Phase) -> list[Failure]:
    """The failures of the ranks themselves, without those that follow from a lost or an expectedly failed rank."""
    is_lost = any(end.is_lost for end in phase.ends)
    has_xfailed = any(_is_xfailed(report) for report in phase.reports.values())

    def follows(report: dict[str, Any]) -> bool:
        if _is_unexpected_pass(report):
            return is_lost or has_xfailed
        return is_lost and bool(report.get(IS_LOST_PEER))

    own = {rank: report for rank, report in phase.reports.items() if report["outcome"] == "failed"}
    failed = {rank: report for rank, report in own.items() if not follows(report)}
    groups = grouped(failed, lambda rank: _cause(failed[rank]))
    return [_of_group(ranks, failed) for ranks in groups.values()]


def _of_group(ranks: Sequence[int], failed: dict[int, dict[str, Any]]) -> Failure:
    first = failed[ranks[0]]
    own = {rank: message(failed[rank]) for rank in ranks}
    notes = [(f"On rank {rank}", own[rank]) for rank in ranks if own[rank] != own[ranks[0]]]
    return Failure(tuple(ranks), first, notes=tuple(notes))


def _cause(report: dict[str, Any]) -> tuple[object, ...]:
    """Equal for failures of one kind that came about along the same lines; values in the message may differ."""
    longrepr = report["longrepr"]
    if not isinstance(longrepr, dict):
        return (str(longrepr),)
    crash = longrepr["reprcrash"] or {}
    kind = re.match(r"[\w.]*", message(report))
    entries = [entry["data"].get("reprfileloc") for entry in longrepr["reprtraceback"]["reprentries"]]
    lines = [(entry["path"], entry["lineno"]) for entry in entries if entry]
    return (crash.get("path"), crash.get("lineno"), kind and kind[0], *lines)


def message(report: dict[str, Any]) -> str:
    """What an exception says; the text of a failure that is no exception."""
    longrepr = report["longrepr"]
    if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
        return str(longrepr["reprcrash"]["message"])
    return str(longrepr)


def _is_xfailed(report: dict[str, Any]) -> bool:
    return report["outcome"] == "skipped" and "wasxfail" in report


def _is_unexpected_pass(report: dict[str, Any]) -> bool:
    return str(report["longrepr"]).startswith("[XPASS(strict)]")


# Ranks that did not


def _unreported(phase: Phase, *, is_explained: bool) -> list[Failure]:
    """Ranks that died, or that ran until the limit of the test."""
    dead = [end for end in phase.ended_in_it if end.has_died or end.error]
    stopped = [end for end in dead if _is_stopped_by_sentinel(end, phase)]
    died = [end for end in dead if end not in stopped]
    found = [*_died(phase, died), *_late(phase)]
    if stopped and not is_explained:
        return [Failure(_ranks(stopped), text=phase.stopped_by), *found]
    return found


def _is_stopped_by_sentinel(end: RankEnd, phase: Phase) -> bool:
    has_code = end.exit_code == 1 and not end.error
    return phase.stopped_by != "" and has_code


def _died(phase: Phase, dead: Sequence[RankEnd]) -> list[Failure]:
    groups = grouped(dead, lambda end: end.error.replace(f"rank {end.rank}", "rank") or str(end.exit_code))
    return [Failure(_ranks(ends), text=_death(phase, ends)) for ends in groups.values()]


def _death(phase: Phase, ends: Sequence[RankEnd]) -> str:
    if ends[0].error:
        return ends[0].error
    code = ends[0].exit_code
    how = f"died with exit code {code}" if code is None or code >= 0 else f"was killed by {_signal_name(-code)}"
    return f"{named_ranks(_ranks(ends))} {how} in the {phase.when} of the test"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _late(phase: Phase) -> list[Failure]:
    late = [end for end in phase.ended_in_it if end.is_late]
    if not late:
        return []
    lines = [f"rank {end.rank} stands at {where(end.stack)}" for end in late]
    text = f"{named_ranks(_ranks(late))} did not finish the {phase.when} of the test in time"
    stacks = tuple((f"Stack of rank {end.rank}, innermost frame first", own_frames(end.stack)) for end in late)
    return [Failure(_ranks(late), text="\n".join([text, *lines]), notes=stacks)]


def _waiting(end: RankEnd) -> Section:
    title = f"Rank {end.rank} had not finished and was stopped, at {where(end.stack)}"
    return title, own_frames(end.stack)


def _ranks(ends: Sequence[RankEnd]) -> tuple[int, ...]:
    return tuple(end.rank for end in ends)


# Stacks

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+)(?: in (?P<function>.*))?')
_OF_LIBRARIES = ("/site-packages/", "/lib/python3", "<frozen", "/tpcompile/pytest_plugin/")


def own_frames(stack: str) -> str:
    """The frames of a stack inside of the test, innermost first."""
    lines = [line.strip() for line in stack.splitlines() if _FRAME.search(line)]
    ends = [number for number, line in enumerate(lines) if "/_pytest/python.py" in line]
    return "\n".join(lines[: ends[0]] if ends else lines)


def where(stack: str) -> str:
    """`file:line in function` of the innermost frame outside of libraries; of any frame where there is none."""
    frames = [found for found in map(_FRAME.search, own_frames(stack).splitlines()) if found]
    own = [found for found in frames if not any(part in found["file"] for part in _OF_LIBRARIES)]
    for found in [*own, *frames]:
        return f"{found['file']}:{found['line']} in {found['function']}"
    return "an unknown line"
