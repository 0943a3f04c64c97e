"""An exception ends one rank: its traceback is seen, and torchrun blames that rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT, torchrun

PLANTED = {"loop": "ValueError: planted in the loop", "cleanup": "ValueError: planted in the loop",
           "compile": "ImportError: planted in the backend"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", PLANTED)
def test_the_traceback_of_the_rank_that_raised_is_printed_kept_and_the_root_cause(form: str, tmp_path: Path) -> None:
    done = torchrun([ROOT / "tests/sentinel/raising.py", form], cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stderr
    of_ranks, _, of_torchrun = said.partition("ChildFailedError")
    assert PLANTED[form] in of_ranks, said
    (kept,) = tmp_path.glob("runs/*-sentinel/rank_1/traceback.txt")
    assert PLANTED[form] in kept.read_text()
    root_cause = of_torchrun.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root_cause), said
    assert PLANTED[form] in root_cause
