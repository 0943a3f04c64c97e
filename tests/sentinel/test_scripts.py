"""The measurement of a divergent rank, at its smallest: the sentinel's job ends by itself, with rank and line named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_job_of_a_divergent_rank_ends_and_names_its_line(tmp_path: Path) -> None:
    out, script = tmp_path / "found.json", str(ROOT / "scripts/bench_divergence.py")
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    # The job without the sentinel is ended before it gets anywhere: how long that one hangs is not tested.
    options = ["--nproc", "2", "--preset", "cpu_smoke", "--plain-limit-s", "1", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, script, *options], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240
    )
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())["sentinel"]
    assert (done.returncode, found["ended_by_itself"], found["exit_code"]) == (0, True, 1), found
    assert all("rank 1" in f["title"] for f in found["findings"])
    assert {f["line"].partition(" in forward ")[2] for f in found["findings"]} == {"if self.keeps_statistics:"}
    assert str(tmp_path) not in json.dumps(found["findings"])  # generated code is nobody's line
