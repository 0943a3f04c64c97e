"""`tpcompile tune`: where it cannot run it says why, and otherwise it prints, keeps and writes what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.by_size import tuned_ranks as ranks
from tpcompile.by_size.table import Table
from tpcompile.testing import run_on_ranks

ROWS = "4096:one_shot"


def tune(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The command, where the programs in `path` are found first."""
    command = [sys.executable, "-m", "tpcompile", "tune", *arguments]
    environ = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_without_gpus_and_for_a_number_of_ranks_that_is_not_summed_it_is_refused(tmp_path: Path) -> None:
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\nexit 1\n")
    listing.chmod(0o755)
    refused = tune(path=str(tmp_path))
    assert refused.returncode == 4 and re.search("--nproc 2, .*0 GPUs", refused.stderr)
    refused = tune("--nproc", "3")
    assert refused.returncode == 2 and re.search("--nproc 3; choose from 2, 4, 8", refused.stderr)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees GPUs here")
def test_ranks_that_do_not_see_the_gpus_say_so(tmp_path: Path) -> None:
    """Two are listed, and torch has none."""
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: two'\n")
    listing.chmod(0o755)
    failed = tune("--anew", path=str(tmp_path))
    assert failed.returncode == 1 and re.search("device=cuda, .*no GPU", failed.stderr)


def test_what_was_measured_is_printed_kept_and_written(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.tunes, str(tmp_path))
    assert [one["codes"] for one in found] == [[0, 0, 0, 1]] * 2
    assert [one["measured"] for one in found] == [2, 2]  # the second time it was kept; the third is anew
    texts = found[0]["texts"]
    for text in texts[:2]:
        assert re.search(f"2 x {ranks.GPU}, .*`a test`: one_shot .* 4096 bytes, nccl ", text)
        assert re.search(r"4096 .*10\.0 .*5\.0 .*12\.0", text)
    told: dict[str, Any] = json.loads(texts[2])
    assert told["gpu"] == ranks.GPU and told["rows"] == [{"algorithm": "one_shot", "up_to_bytes": 4096}]
    written = Table.read(tmp_path / "table.json")
    assert written.rows(ranks.GPU, 2) == ROWS and written.rows("other", 2) == ROWS
    assert found[1]["texts"] == [""] * 4
