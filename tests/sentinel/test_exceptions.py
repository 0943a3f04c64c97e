"""An exception ends one rank: its traceback is seen, and torchrun blames that rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT, torchrun
from tpcompile.sentinel.checks import failure_check

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


def test_an_error_of_an_operator_in_traced_code_is_named_with_its_own_message() -> None:
    """torch's first line says only that some call failed: what did not fit stands in its explanation."""
    text = (
        "RuntimeError when making fake tensor call\n  Explanation: Dynamo failed to run FX node with fake tensors: "
        "call_function <built-in function add>(*(...), **{}): got RuntimeError('The size of tensor a (8) must match')\n"
    )
    check = failure_check(1, RuntimeError(text), None, failed=[], traced=None, is_of_compiler=True)
    expected = "RuntimeError: RuntimeError when making fake tensor call: The size of tensor a (8) must match"
    assert (check.observed, check.ranks) == (expected, (1,))
