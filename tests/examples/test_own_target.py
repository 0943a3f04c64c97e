"""The target of docs/own-model.md, as it stands there, through the gate."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.forked import PYTHONPATH, ROOT, torchrun
from tpcompile.evidence.records import CheckId
from tpcompile.evidence.rundir import RunDir


def test_it_passes_with_its_numbers(tmp_path: Path) -> None:
    (code,) = [
        block for block in re.findall(r"^```python\n(.*?)^```$", _page(), re.M | re.S) if "def build(ctx)" in block
    ]
    (tmp_path / "my_model.py").write_text(code)
    command = [ROOT / "repro" / "tp_compile_repro.py", "--target", "my_model:build", "--set", "width=32"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    flags = ["--set", "compile.backend=aot_eager", "--device", "cpu", "--run-dir", "run", "--quiet-report"]
    ended = torchrun([*command, *flags], environ=environ, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None and {check.id: check.status for check in verdict.checks}[CheckId.FORWARD] == "pass"


def _page() -> str:
    return (ROOT / "docs" / "own-model.md").read_text()
