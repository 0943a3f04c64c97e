from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.errors import PreflightError
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import junit
from tpcompile.report.publish import publish, write


def test_publish_writes_junit_prints_the_report_and_leaves_annotations_unwrapped(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path / "run"), io.StringIO()
    publish(
        samples.failing(), run, Console(file=out, width=80), {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": "/repo"}
    )
    assert run.junit.read_text() == junit.render(samples.failing())
    annotations = [line for line in out.getvalue().splitlines() if line.startswith("::error ")]
    assert len(annotations) == 1
    assert annotations[0].endswith(samples.divergence().advice)
    assert f"tpcompile compare {run.path}" in out.getvalue()


def unwritable(*_: object) -> str:
    """What a full disk says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_the_files_and_not_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = RunDir.create(tmp_path / "run"), io.StringIO()
    monkeypatch.setattr("tpcompile.evidence.rundir.temporary", unwritable)
    publish(samples.failing(), run, Console(file=out, width=80), {})
    assert "FAIL (exit 1)" in out.getvalue()
    assert "junit.xml" in out.getvalue() and os.strerror(errno.ENOSPC) in out.getvalue()


def test_a_run_directory_on_a_full_disk_is_an_environment_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run")
    monkeypatch.setattr("tpcompile.evidence.rundir.temporary", unwritable)
    with pytest.raises(PreflightError, match=os.strerror(errno.ENOSPC)):
        run.write_verdict(samples.failing())


def test_a_step_summary_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path / "run"), io.StringIO()
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path)}
    publish(samples.failing(), run, Console(file=out, width=80), environ)
    warnings = [line for line in out.getvalue().splitlines() if line.startswith("::warning ")]
    assert len(warnings) == 1 and str(tmp_path) in warnings[0] and os.strerror(errno.EISDIR) in warnings[0]


class Closed(io.StringIO):
    """The reader of a pipe is gone."""

    def write(self, text: str) -> int:
        """Refused."""
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_closed_stdout_costs_the_annotations_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path / "run")
    with open(tmp_path / "stdout", "w") as stdout:  # it is led nowhere afterwards: not the one of pytest
        monkeypatch.setattr(sys, "stdout", stdout)
        write(samples.failing(), run, Console(file=Closed()), {"GITHUB_ACTIONS": "true"})
        monkeypatch.undo()
    assert run.junit.exists()
