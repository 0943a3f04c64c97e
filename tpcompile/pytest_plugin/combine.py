"""How each rank ended -> the reports of the test: one for each cause of a failure, one for all ranks otherwise."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.pytest_plugin import github
from tpcompile.pytest_plugin.causes import Failure, Phase, RankEnd, failures, message
from tpcompile.pytest_plugin.files import RUN_DIR, STREAMS, Job

_PHASES = ("setup", "call", "teardown")
_VERDICT = re.compile(r"^tpcompile (?:check|sentinel): running program", re.MULTILINE)
"""Begin of the verdict with which a sentinel ends a rank: that of `tpcompile.capture`, or one of the test itself."""
_OUTPUT = tuple(f"Captured {stream} " for stream in STREAMS)
"""Beginnings of the names of sections with output; others are logs."""


class RankFailure(Exception):
    """A failure that a rank could not report itself."""


def not_checked(item: pytest.Item, why: str) -> Iterator[pytest.TestReport]:
    """A skipped test, or a failed one with `--tp-require`."""
    text = f"not checked: {why}"
    if item.config.getoption("--tp-require"):
        fields = _fields(item, "setup") | {"outcome": "failed", "longrepr": _longrepr(item, text)}
    else:
        file, line, _ = item.location
        fields = _fields(item, "setup") | {"outcome": "skipped", "longrepr": (file, line, f"Skipped: {text}")}
    yield pytest.TestReport(**fields)
    yield pytest.TestReport(**_fields(item, "teardown"))


def of_test(item: pytest.Item, job: Job, ends: Sequence[RankEnd]) -> Iterator[pytest.TestReport]:
    """The reports of a test that ran on ranks, phase by phase."""
    stopped_by = _verdict(job.files.stopped_by_sentinel)
    if item.config.getoption("capture") == "no":
        _print_output(ends)
    failed: set[int] = set()
    for when in _PHASES:
        phase = Phase(when, ends, stopped_by)
        is_consequence = when == "teardown" and phase.has_lost_rank and failed
        found = [] if is_consequence else failures(phase)
        for failure in found:
            failed.update(failure.ranks)
            report = _failed(item, phase, failure)
            github.attach(report, _run_dir(failure, job), item.config.rootpath)
            yield report
        # pytest expects a report of every teardown, and of no call after a failed setup.
        is_expected = when == "teardown" or (bool(phase.reports) and not (when == "call" and failed))
        if not found and is_expected:
            yield _not_failed(item, phase, shown=failed or set(range(job.world_size)))


def _run_dir(failure: Failure, job: Job) -> Path | None:
    if failure.report is not None:
        named = failure.report.get(RUN_DIR)
        return Path(named) if named else None
    return job.files.stopped_by_sentinel if failure.is_by_sentinel else None


def _not_failed(item: pytest.Item, phase: Phase, *, shown: Collection[int]) -> pytest.TestReport:
    """One report for all ranks, with the output of some: passed, or skipped with the ranks that skipped it."""
    skipped, passed = phase.with_outcome("skipped"), phase.with_outcome("passed")
    reports = skipped or passed
    if not reports:
        return pytest.TestReport(**_fields(item, phase.when))
    report = _read(item, next(iter(reports.values())), phase)
    report.sections = _output(phase, shown)
    is_skipped_on_some = 0 < len(skipped) < len(phase.reports)
    if is_skipped_on_some and isinstance(report.longrepr, tuple):
        file, line, why = report.longrepr
        report.longrepr = (file, line, f"{named_ranks(tuple(skipped))}: {why.removeprefix('Skipped: ')}")
    return report


def _failed(item: pytest.Item, phase: Phase, failure: Failure) -> pytest.TestReport:
    ranks = named_ranks(failure.ranks)
    if failure.report is not None:
        report = _read(item, _with_ranks(failure.report, ranks), phase)
    else:
        report = pytest.TestReport(**_fields(item, phase.when) | _outcome(item, failure.text))
        report.duration = _duration_s(phase)
    file, line, name = report.location
    report.location = (file, line, f"{name} [{ranks}]")
    report.sections = [*failure.notes, *_output(phase, failure.ranks)]
    return report


def _outcome(item: pytest.Item, text: str) -> dict[str, Any]:
    """Outcome for ranks that could not report: an expected failure under `xfail` without a condition."""
    longrepr = _longrepr(item, text)
    for mark in item.iter_markers("xfail"):
        has_condition = bool(mark.args) or "raises" in mark.kwargs
        is_run = mark.kwargs.get("run", True)
        if is_run and not has_condition:
            return {"outcome": "skipped", "longrepr": longrepr, "wasxfail": mark.kwargs.get("reason", "")}
    return {"outcome": "failed", "longrepr": longrepr}


def _with_ranks(report: dict[str, Any], ranks: str) -> dict[str, Any]:
    """The report with the ranks in its message, which summaries and junit.xml show."""
    longrepr = report["longrepr"]
    if not isinstance(longrepr, dict) or not longrepr.get("reprcrash"):
        return report
    crash = {**longrepr["reprcrash"], "message": f"{ranks}: {message(report)}"}
    chain = [[*element] for element in longrepr.get("chain") or ()]
    if chain:
        chain[-1][1] = crash
    return {**report, "longrepr": {**longrepr, "reprcrash": crash, "chain": chain or None}}


def _read(item: pytest.Item, report: dict[str, Any], phase: Phase) -> pytest.TestReport:
    """The report of a rank, with the longest duration of all."""
    found = item.config.hook.pytest_report_from_serializable(config=item.config, data=dict(report))
    assert isinstance(found, pytest.TestReport)
    found.location = (found.location[0], found.location[1], found.location[2])
    found.user_properties = [(name, value) for name, value in found.user_properties]
    if isinstance(found.longrepr, list):
        found.longrepr = tuple(found.longrepr)
    found.duration = _duration_s(phase)
    return found


def _duration_s(phase: Phase) -> float:
    return max((report["duration"] for report in phase.reports.values()), default=0.0)


def _fields(item: pytest.Item, when: str) -> dict[str, Any]:
    return {
        "nodeid": item.nodeid,
        "location": item.location,
        "keywords": dict.fromkeys(item.keywords, 1),
        "outcome": "passed",
        "longrepr": None,
        "when": when,
    }


def _longrepr(item: pytest.Item, text: str) -> Any:
    try:
        raise RankFailure(text)
    except RankFailure as error:
        found = pytest.ExceptionInfo.from_exception(error).getrepr(style="value")
    crash = getattr(found, "reprcrash", None)
    if crash is not None:
        crash.path, crash.lineno, crash.message = str(item.path), (item.location[1] or 0) + 1, text
    return found


# Output


def _output(phase: Phase, ranks: Collection[int]) -> list[tuple[str, str]]:
    """Sections of these ranks up to this phase, each with its rank."""
    found: list[tuple[str, str]] = []
    phases = _PHASES[: _PHASES.index(phase.when) + 1]
    for end in phase.ends:
        if end.rank not in ranks:
            continue
        sections = _sections(end, phases)
        if end in phase.ended_in_it:
            sections += _unreported(end, phase)
        found += [(f"{name} (rank {end.rank})", text) for name, text in sections]
    return found


def _unreported(end: RankEnd, phase: Phase) -> Iterator[tuple[str, str]]:
    """Output after the last report of a rank, without the verdict of a sentinel: that is the text of the failure."""
    for stream, text in end.unreported.items():
        own = _VERDICT.split(text, maxsplit=1)[0] if phase.stopped_by else text
        if own.strip():
            yield f"Captured {stream} {phase.when}", own


def _sections(end: RankEnd, phases: Sequence[str]) -> list[tuple[str, str]]:
    """Captured output of a rank in these phases; pytest repeats sections of earlier phases in later reports."""
    found: dict[tuple[str, str], None] = {}
    for when in phases:
        sections = end.reports.get(when, {}).get("sections", [])
        found |= dict.fromkeys((name, text) for name, text in sections)
    return list(found)


def _print_output(ends: Sequence[RankEnd]) -> None:
    """Print the output of every rank when the test has ended, as `-s` asks for."""
    for end in ends:
        lines = []
        for name, text in _sections(end, _PHASES):
            if name.startswith(_OUTPUT):
                lines += text.splitlines()
        for text in end.unreported.values():
            lines += text.splitlines()
        for line in lines:
            print(f"[rank {end.rank}] {line}")


def _verdict(folder: Path) -> str:
    """The verdict of a sentinel that ended ranks, in its run directory; empty when none did."""
    if not folder.exists():
        return ""
    from tpcompile.evidence.rundir import RunDir
    from tpcompile.pytest_plugin.verdict import verdict_text

    verdict = RunDir(folder).read_verdict()
    return verdict_text(verdict, folder) if verdict is not None else ""
