from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tests.report import samples
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import junit
from tpcompile.report.publish import publish


def test_publish_writes_junit_prints_the_report_and_leaves_annotations_unwrapped(tmp_path: Path) -> None:
    run, out = RunDir.create(tmp_path / "run"), io.StringIO()
    publish(
        samples.failing(), run, Console(file=out, width=80), {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": "/repo"}
    )
    assert run.junit.read_text() == junit.render(samples.failing())
    annotations = [line for line in out.getvalue().splitlines() if line.startswith("::error ")]
    assert len(annotations) == 1
    assert annotations[0].endswith("or declare it under gate.allow")
    assert f"tpcompile compare {run.path}" in out.getvalue()
