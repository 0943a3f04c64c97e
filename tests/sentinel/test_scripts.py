"""The measurement of a divergent rank, at its smallest: the sentinel's job ends by itself, with rank and line named."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_python
from tpcompile.process_tree import Outcome

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_divergence.py"


def run_tree(command: Sequence[str], *, environ: Mapping[str, str], **_: Any) -> Outcome:
    """That of the script, with forked ranks. The job without the sentinel is not run: its hang is not tested."""
    if "--watched" not in command:
        return Outcome(exit_code=-9, timed_out=True)
    ended = run_python(command[1:], environ=environ)
    return Outcome(exit_code=ended.returncode, timed_out=ended.returncode == 124)


@pytest.mark.slow
def test_the_job_of_a_divergent_rank_ends_and_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("bench_divergence", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "found.json"
    monkeypatch.setattr(script, "run_tree", run_tree)
    options = ["--nproc", "2", "--preset", "cpu_smoke", "--backend", "eager", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    code = script.main()
    found = json.loads(out.read_text())["sentinel"]
    assert (code, found["ended_by_itself"], found["exit_code"]) == (0, True, 1), found
    assert all("rank 1" in f["title"] for f in found["findings"])
    assert {f["line"].partition(" in forward ")[2] for f in found["findings"]} == {"if self.keeps_statistics:"}
    assert str(tmp_path) not in json.dumps(found["findings"])  # generated code is nobody's line
