"""A case and the result of a route -> named, detected, missed, hang, ...: pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from tests.faults.drawn.names import Route
from tests.faults.drawn.operators.operator import Trace
from tests.faults.drawn.plan import Case, Truth
from tests.faults.judge import Evidence, Found, Outcome, first_finding
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import CheckId, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.lines import is_installed
from tpcompile.evidence.text.ranks import ranks_text

PROGRAM_FILE = "program.py"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One row."""

    outcome: Outcome
    wrong: tuple[str, ...] = ()
    """Which of cause, rank and line is wrong, or what else is."""
    found: Found | None = None


def judge(case: Case, route: Route, evidence: Evidence) -> Judged:
    """The row of a case on a route."""
    found = first_finding(evidence.verdict) if evidence.verdict else None
    if route == Route.SENTINEL and evidence.is_hang:
        return Judged(outcome=Outcome.HANG, found=found)
    if case.operator.is_healthy:
        return _healthy(route, evidence, found)
    if evidence.reached_at is None:
        return Judged(outcome=Outcome.BROKEN, wrong=("the fault was never reached",), found=found)
    return _faulty(case, route, evidence, found)


def _faulty(case: Case, route: Route, evidence: Evidence, found: Found | None) -> Judged:
    if route == Route.CHECK_RANKS and evidence.verdict is None:
        return Judged(outcome=Outcome.DIED)
    if route != Route.SENTINEL and case.truth.trace == Trace.ABSENT:
        return _not_compiled(route, evidence, found)
    if found is None:
        return Judged(outcome=_of_green(case, route, evidence))
    wrong = differences(case.truth, found)
    outcome = Outcome.DETECTED if wrong else Outcome.NAMED
    return Judged(outcome=outcome, wrong=tuple(wrong), found=found)


def _of_green(case: Case, route: Route, evidence: Evidence) -> Outcome:
    """The outcome of a fault without a finding: `diagnose` names a rank that left no log."""
    may_lack_log = route == Route.DIAGNOSE and case.operator.leaves_no_log
    if may_lack_log and _lacks_log(case, evidence):
        return Outcome.NAMED
    return Outcome.MISSED


def _healthy(route: Route, evidence: Evidence, found: Found | None) -> Judged:
    if found is not None:
        return Judged(outcome=_of_red(route, evidence, found), found=found)
    if route == Route.DIAGNOSE and evidence.diagnose_code != 0:
        return Judged(outcome=Outcome.FALSE_ALARM)
    if not evidence.ended_well:
        return Judged(outcome=Outcome.BROKEN, wrong=("a healthy program failed",))
    return Judged(outcome=Outcome.GREEN)


def _of_red(route: Route, evidence: Evidence, found: Found) -> Outcome:
    """The outcome of a healthy program with a finding."""
    if route == Route.CHECK_RANKS and _is_of_package(found, evidence):
        return Outcome.OF_PACKAGE
    return Outcome.FALSE_ALARM


def _is_of_package(found: Found, evidence: Evidence) -> bool:
    """True for a graph break on all ranks inside an installed package: some versions of transformers have one."""
    assert evidence.verdict is not None
    is_everywhere = len(found.ranks) == evidence.verdict.world_size
    is_break = found.cause == Cause.GRAPH_BREAK
    return is_break and is_everywhere and found.line is not None and is_installed(found.line)


def _lacks_log(case: Case, evidence: Evidence) -> bool:
    """True when the verdict is that this rank left no log: it never compiled anything, or its log is lost."""
    if evidence.verdict is None or evidence.diagnose_code != ExitCode.INCOMPLETE:
        return False
    checks = [check for check in evidence.verdict.checks if check.id == CheckId.LOGS_COMPLETE]
    return any(check.ranks == (case.rank,) for check in checks)


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
    if not _blamed_ranks(found).intersection(truth.ranks):
        wrong.append("rank")
    if truth.lines is not None and not _is_on(truth, found.line):
        wrong.append("line")
    return wrong


def _is_on(truth: Truth, line: UserLine | None) -> bool:
    if line is None or truth.lines is None:
        return False
    file = PurePath(line.file).name
    is_on_line = file == PROGRAM_FILE and line.line in truth.lines
    return is_on_line or file == truth.file


def _blamed_ranks(found: Found) -> set[frozenset[int]]:
    """Sets of ranks that a finding may blame: the odd ranks, and without a majority all ranks that differ."""
    odd, without_majority = frozenset(found.ranks), frozenset(found.without_majority)
    return {odd, without_majority} if without_majority else {odd}


def described(judged: Judged) -> str:
    """What was found, in one line."""
    if judged.found is None:
        return "; ".join(judged.wrong)
    found = judged.found
    ranks = ranks_text(found.ranks) or "none"
    line = f"{PurePath(found.line.file).name}:{found.line.line}" if found.line else "no line"
    text = f"{found.cause.name.lower()}, rank {ranks}, {line}: {found.text}"
    return f"{', '.join(judged.wrong)} wrong; {text}" if judged.wrong else text
