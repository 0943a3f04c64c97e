"""Things among the logs that are no logs -> one line each, the right exit code, no hang."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.evidence.logs.damage import rehashed
from tests.evidence.logs.test_damage import shown
from tests.evidence.logs.test_diagnose import JOBS, LOG, check
from tpcompile.errors import ConfigError, PreflightError
from tpcompile.evidence.judgement import checks
from tpcompile.evidence.logs.diagnose import LEFT_OUT, diagnose
from tpcompile.evidence.logs.ends import Lack
from tpcompile.evidence.logs.files import find_logs


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    """A copy of a job whose ranks agree."""
    return Path(shutil.copytree(JOBS / "cold_shared", tmp_path / "healthy"))


def test_names_without_a_suffix_are_found(healthy: Path) -> None:
    for rank in (0, 1):
        (healthy / LOG.format(rank)).rename(healthy / f"dedicated_log_torch_trace_rank_{rank}.log")
    assert list(find_logs([healthy]).paths) == [0, 1]


def test_a_directory_called_like_a_log_is_one_line(healthy: Path) -> None:
    (healthy / "dedicated_log_torch_trace_rank_2_x.log").mkdir()
    verdict = diagnose([healthy])
    assert verdict.exit_code == 0
    (line,) = check(verdict, LEFT_OUT).details
    assert line.startswith("dedicated_log_torch_trace_rank_2_x.log") and "directory" in line


def test_a_pipe_called_like_a_log_is_one_line_and_no_hang(healthy: Path) -> None:
    os.mkfifo(healthy / "dedicated_log_torch_trace_rank_2_x.log")
    verdict = diagnose([healthy])
    assert verdict.exit_code == 0 and "a pipe" in check(verdict, LEFT_OUT).details[0]


def test_an_impossible_rank_is_one_line_and_no_list_of_missing_ranks(healthy: Path) -> None:
    shutil.copy(healthy / LOG.format(1), healthy / LOG.format(99999999))
    verdict = diagnose([healthy])
    assert (verdict.exit_code, verdict.world_size) == (0, 2)
    assert LOG.format(99999999) in check(verdict, LEFT_OUT).details[0]


def test_a_name_without_a_rank_is_one_line(healthy: Path) -> None:
    shutil.copy(healthy / LOG.format(1), healthy / "dedicated_log_torch_trace_abc.log")
    assert "before init_process_group" in check(diagnose([healthy]), LEFT_OUT).details[0]


def test_json_nested_deeper_than_a_parser_goes_is_a_record_that_cannot_be_read(healthy: Path) -> None:
    deep = '{"dynamo_start": ' + "[" * 200_000 + "]" * 200_000 + "}"
    text = (healthy / LOG.format(1)).read_text()
    first, rest = text.split("\n", 1)
    (healthy / LOG.format(1)).write_text(f"{first}\nV1121 15:15:15.319000 1 x.py:1] {deep}\n{rest}")
    assert diagnose([healthy]).exit_code == 6
    assert Lack.DAMAGED in shown(healthy, 1)


def test_a_file_that_is_no_log_at_all_is_an_empty_one(healthy: Path) -> None:
    (healthy / LOG.format(1)).write_bytes(os.urandom(100_000))
    assert diagnose([healthy]).exit_code == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_log_without_read_permission_is_reported(healthy: Path) -> None:
    (healthy / LOG.format(1)).chmod(0)
    with pytest.raises(PreflightError, match="Permission denied"):
        diagnose([healthy])


def with_version(path: Path, version: str) -> None:
    """Add the record by which torch says its version."""
    payload = json.dumps({"pytorch_version": version})
    artifact = '{"artifact": {"name": "torch_version", "encoding": "json"}, "has_payload": "0"}'
    record = f"V1121 15:00:00.000000 1 x.py:1] {artifact}"
    path.write_text(rehashed(f"{record}\n\t{payload}\n{path.read_text()}"))


def test_ranks_of_several_torch_versions_are_the_finding(healthy: Path) -> None:
    with_version(healthy / LOG.format(0), "2.13.0")
    with_version(healthy / LOG.format(1), "2.11.0")
    verdict = diagnose([healthy])
    assert verdict.exit_code == 1
    assert "2.13.0" in verdict.summary and "2.11.0" in verdict.summary


def test_one_torch_version_is_observed(healthy: Path) -> None:
    for rank in (0, 1):
        with_version(healthy / LOG.format(rank), "2.13.0")
    verdict = diagnose([healthy])
    assert verdict.exit_code == 0
    assert "2.13.0" in check(verdict, f"environment {checks.AGREE}").observed


def test_folders_of_two_runs_are_refused(healthy: Path, tmp_path: Path) -> None:
    folders = []
    for rank in (0, 1):
        folder = tmp_path / f"node_{rank}"
        (folder / "trace").mkdir(parents=True)
        (folder / "watched").mkdir()
        (healthy / LOG.format(rank)).rename(folder / "trace" / LOG.format(rank))
        (folder / "watched" / f"rank_{rank}.json").write_text('{"job": "one"}')
        folders.append(folder)
    traces = [folder / "trace" for folder in folders]
    assert list(find_logs(folders).paths) == list(find_logs(traces).paths) == [0, 1]
    (folders[1] / "watched" / "rank_1.json").write_text('{"job": "other"}')
    for given in (folders, traces):
        with pytest.raises(ConfigError, match="different runs"):
            find_logs(given)
