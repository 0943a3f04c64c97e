"""Reports of other tools, read from their output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults import columns, run
from tests.faults.case import CASES
from tests.faults.columns import Report, read_detail, read_spmd_check, text_of
from tests.faults.sweep import sweep

MISMATCH = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE), but Rank 1 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=4, OpType=BROADCAST)"
)


@pytest.mark.parametrize(
    ("log", "report"),
    [
        (MISMATCH, Report.NAMED),
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms", Report.DETECTED),
        ("Traceback (most recent call last): ValueError", Report.SILENT),
    ],
)
def test_detail_names_two_collectives_or_only_a_missing_rank(tmp_path: Path, log: str, report: Report) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert read_detail(tmp_path) == report


@pytest.mark.parametrize(("log", "report"), [("SPMD GRAPH MISMATCH", Report.NAMED), ("all is well", Report.SILENT)])
def test_spmd_check_names_nodes_or_is_silent(tmp_path: Path, log: str, report: Report) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert read_spmd_check(tmp_path) == report


def test_a_tool_that_reports_and_lets_the_job_hang_is_both() -> None:
    assert text_of(Report.NAMED, timed_out=True) == "named, hang"
    assert text_of(Report.SILENT, timed_out=True) == "hang"
    assert text_of(Report.SILENT, timed_out=False) == "silent"


def test_a_tool_that_is_not_installed_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns.shutil, "which", lambda name: None)
    monkeypatch.setattr(run, "finished", finished_without_a_trace)
    (result,) = sweep([CASES.find("stride")], tmp_path, tools=["tlparse"])
    assert result.columns == {"tlparse": "not here"}


def finished_without_a_trace(launches: Sequence[run.Launch], _: object) -> Iterator[tuple[run.Launch, run.Ended]]:
    for launch in launches:
        launch.out.mkdir(parents=True)
        yield launch, run.Ended(codes={0: 0}, is_hang=False, wall_s=0.0)
