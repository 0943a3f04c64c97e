"""What a framework does itself and is true: still so, and what the repro says helps does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.clients.launch import ROOT
from tpcompile.launch import torchrun
from tpcompile.process_tree import run_tree

pytestmark = pytest.mark.timeout(200)


def test_megatron_core_breaks_the_graph_on_rank_zero_only_unless_its_warning_is_ignored(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as out:
        command = torchrun(2, [str(ROOT / "repro" / "megatron_warning_on_rank_zero.py")])
        ended = run_tree(command, environ=variables, timeout_s=150.0, grace_s=3.0, stdout=out)
    found = dict(re.findall(r"^(.+): \(graphs, breaks\) of each rank: (.+)$", log.read_text(), re.MULTILINE))
    assert (ended.exit_code, found["ignored"]) == (1, "[(1, 0), (1, 0)]"), (
        "drop the repro and its row in docs/adapters.md"
    )
    zero, one = re.findall(r"\((\d+), (\d+)\)", found["as it is"])
    assert int(zero[1]) > 0 and one == ("1", "0")
