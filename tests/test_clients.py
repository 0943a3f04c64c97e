"""The table of tests/clients without its frameworks: what is right for each fault, and how a finding is judged."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests import conftest
from tests.clients.case import Client, Fault
from tests.clients.clients import CLIENTS
from tests.clients.judge import judged
from tests.clients.launch import ROOT, Outcome
from tests.clients.table import as_page, as_text, read, summary, write
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Lead, Status, UserLine, Verdict
from tpcompile.evidence.records.causes import Cause

FAULTS = [(client, fault) for client in CLIENTS for fault in client.faults]
CLIENT, FAULT = next(case for case in FAULTS if case[0].num_ranks == 2)


@pytest.mark.parametrize(("client", "fault"), FAULTS, ids=lambda case: getattr(case, "folder", None) or case.name)
def test_a_fault_has_lines_a_cause_and_a_public_report(client: Client, fault: Fault) -> None:
    assert client.lines_of(fault)
    assert fault.causes and Cause.UNKNOWN not in fault.causes
    assert fault.rank < client.num_ranks
    assert fault.reports and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in fault.reports)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.folder)
def test_a_client_has_two_faults_and_no_marker_of_another(client: Client) -> None:
    source = client.program.read_text()
    ast.parse(source)
    marked = set(re.findall(r"# fault: (\w+)$", source, re.MULTILINE))
    assert marked == {fault.name for fault in client.faults} and len(client.faults) == 2


def test_the_versions_of_the_frameworks_are_pinned() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["clients"]
    pinned = {requirement.split("==")[0] for requirement in groups if "==" in requirement}
    assert {client.needs for client in CLIENTS} - {"torch"} <= pinned


def test_the_ordinary_suite_leaves_them_out_and_the_script_does_not() -> None:
    assert "TPCOMPILE_CLIENTS" not in os.environ
    assert conftest.collect_ignore == ["clients"]
    assert "export TPCOMPILE_CLIENTS=1" in (ROOT / "scripts" / "clients.sh").read_text()


def test_the_page_shows_what_was_measured() -> None:
    rows = read(ROOT / "results" / "clients_cpu.json")
    assert {(row.client, row.fault) for row in rows if row.fault} == {(client.name, f.name) for client, f in FAULTS}
    assert as_page(rows) in (ROOT / "docs" / "results.md").read_text()


def outcome(exit_code: int = 1, *, timed_out: bool = False, **lead: object) -> Outcome:
    """A run that ended with this finding first; the right one where nothing else is said."""
    line = UserLine(file=str(CLIENT.program), line=CLIENT.lines_of(FAULT)[0], function="f", code="")
    fields = {"cause": min(FAULT.causes), "says": "", "ranks": (FAULT.rank,), "line": line, **lead}
    verdict = Verdict(status=Status.FAIL, exit_code=ExitCode.FAIL, world_size=2, summary="", lead=Lead(**fields))
    return Outcome(exit_code=exit_code, timed_out=timed_out, verdict=verdict, wall_s=1.0, text="")


def test_the_right_finding_is_right_in_everything() -> None:
    row = judged(CLIENT, FAULT, "sentinel", outcome())
    assert (row.found, row.rank, row.cause, row.line, row.is_right) == (True, True, True, True, True)


def test_both_of_two_ranks_may_be_shown_where_none_is_blamed() -> None:
    assert judged(CLIENT, FAULT, "sentinel", outcome(ranks=(0, 1), is_rank_known=False)).rank
    assert not judged(CLIENT, FAULT, "sentinel", outcome(ranks=(0, 1))).rank
    assert not judged(replace(CLIENT, num_ranks=4), FAULT, "sentinel", outcome(ranks=(0, 1), is_rank_known=False)).rank


def elsewhere(file: str, line: int) -> UserLine:
    return UserLine(file=file, line=line, function="f", code="")


@pytest.mark.parametrize(
    ("lead", "wrong"),
    [
        ({"ranks": (1 - FAULT.rank,)}, "rank"),
        ({"cause": Cause.STUCK_COLLECTIVE}, "cause"),
        ({"line": None}, "line"),
        ({"line": elsewhere(str(CLIENT.program), 1)}, "line"),
        ({"line": elsewhere("/lib/program.py", CLIENT.lines_of(FAULT)[0])}, "line"),
    ],
)
def test_a_wrong_part_of_a_finding_is_wrong_and_no_other(lead: dict[str, object], wrong: str) -> None:
    row = judged(CLIENT, FAULT, "sentinel", outcome(**lead))
    assert {part for part in ("rank", "cause", "line") if not getattr(row, part)} == {wrong}
    assert row.found and not row.is_right


@pytest.mark.parametrize("ended", [outcome(0), outcome(timed_out=True), outcome(124), replace(outcome(), verdict=None)])
def test_a_job_that_is_not_stopped_with_a_verdict_is_not_found(ended: Outcome) -> None:
    row = judged(CLIENT, FAULT, "sentinel", ended)
    assert not row.found and not row.is_right


def test_rows_of_earlier_calls_stay_in_the_file_and_a_new_one_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    healthy = judged(CLIENT, None, "check", replace(outcome(0), verdict=None))
    wrong = judged(CLIENT, FAULT, "sentinel", outcome(line=None))
    write([wrong, healthy], path)
    right = judged(CLIENT, FAULT, "sentinel", outcome())
    write([right], path)
    assert read(path) == [healthy, right]
    assert summary(read(path)) == {
        "healthy": 1, "alarms": 0, "faults": 1, "found": 1, "rank right": 1, "cause right": 1, "line right": 1,
        "all right": 1,
    }  # fmt: skip
    assert len(as_text(read(path)).splitlines()) == 4
