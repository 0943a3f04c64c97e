"""The verdict of a preflight check prints, publishes and raises as that of `tpcompile.check` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.preflight import shown
from tpcompile.errors import DirectoryTakenError, ExitCode
from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.report.verdict import ShownVerdict
from tpcompile.testing import run_on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("shown")
    return folder, run_on_ranks(shown.run, str(folder), timeout_s=120)


def test_the_first_rank_alone_prints_it(results: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (one["printed"] for one in results[1])
    assert "args[0]" in first and "FAIL" in first
    assert second == ""


def test_all_ranks_raise_it_and_a_green_one_is_returned(results: tuple[Path, list[dict[str, Any]]]) -> None:
    for one in results[1]:
        assert one["raised"] == f"{ExitCode.FAIL}: {one['summary']}"
        assert one["is_green"]


def test_it_is_published_where_a_reader_finds_it(results: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, _) = results
    assert {"verdict.json", "junit.xml"} <= set(first["written"])
    found = RunDir(folder / "run").read_verdict()
    assert found is not None and found.summary == first["summary"]


def test_a_directory_that_has_a_verdict_is_not_overwritten(tmp_path: Path) -> None:
    green = Verdict(status=Status.PASS, exit_code=ExitCode.PASS, world_size=2, summary="2 ranks agree")
    verdict = ShownVerdict.shown(green, is_reporter=True, command="preflight", choose_run_dir=lambda: tmp_path / "run")
    assert verdict.publish() == tmp_path / "run"
    with pytest.raises(DirectoryTakenError):
        verdict.publish()
