"""An exception ends one rank: its traceback is seen, and torchrun blames that rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT, torchrun
from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.sentinel.checks import failure_check

PLANTED = {"loop": "ValueError: planted in the loop", "cleanup": "ValueError: planted in the loop",
           "compile": "ImportError: planted in the backend"}  # fmt: skip
VERDICT = Verdict(status=Status.FAIL, exit_code=3, world_size=2, summary="an earlier job", checks=(), divergences=())


@pytest.mark.slow
@pytest.mark.parametrize("form", PLANTED)
def test_the_traceback_of_the_rank_that_raised_is_printed_kept_and_the_root_cause(form: str, tmp_path: Path) -> None:
    done = torchrun([ROOT / "tests/sentinel/raising.py", form], cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stderr
    of_ranks, _, of_torchrun = said.partition("ChildFailedError")
    assert PLANTED[form] in of_ranks, said
    (kept,) = tmp_path.glob("runs/*-sentinel-*/rank_1/traceback.txt")
    assert PLANTED[form] in kept.read_text()
    root_cause = of_torchrun.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root_cause), said
    assert PLANTED[form] in root_cause


@pytest.mark.slow
def test_the_verdict_of_a_second_job_is_printed_and_kept_beside_that_of_the_first(tmp_path: Path) -> None:
    """A folder has one verdict, the first: a job that wrote into it ended without a word."""
    run = RunDir.create(tmp_path / "taken")
    run.write_verdict(VERDICT)
    done = torchrun([ROOT / "tests/sentinel/raising.py", "loop", str(run.path)], cwd=tmp_path)
    assert done.returncode == 1
    assert PLANTED["loop"] in done.stderr and "FAIL (exit 1)" in done.stderr, done.stderr
    assert f"{run.path}-2" in done.stderr.replace("\n", "")
    assert RunDir.open(f"{run.path}-2").read_verdict().exit_code == 1
    assert run.read_verdict() == VERDICT


@pytest.mark.slow
def test_the_verdict_of_a_job_whose_folder_has_one_is_printed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "taken")
    run.write_verdict(VERDICT)
    done = torchrun([ROOT / "tests/sentinel/raising.py", "loop", str(run.path), "at once"], cwd=tmp_path)
    assert "FAIL (exit 1)" in done.stderr, done.stderr
    assert "a different job" in done.stderr
    assert (run.read_verdict(), run.read_run(), run.junit.exists()) == (VERDICT, {}, False)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_leaves_the_verdict_and_the_root_cause(tmp_path: Path) -> None:
    done = torchrun([ROOT / "tests/sentinel/raising.py", "loop", str(tmp_path / ("a" * 300))], cwd=tmp_path)
    of_ranks, _, of_torchrun = done.stderr.partition("ChildFailedError")
    assert "no report" in of_ranks and "rank divergence: " in of_ranks, of_ranks
    assert PLANTED["loop"] in of_torchrun.partition("Root Cause")[2], of_torchrun


def test_an_error_of_an_operator_in_traced_code_is_named_with_its_own_message() -> None:
    """torch's first line says only that some call failed: what did not fit stands in its explanation."""
    text = (
        "RuntimeError when making fake tensor call\n  Explanation: Dynamo failed to run FX node with fake tensors: "
        "call_function <built-in function add>(*(...), **{}): got RuntimeError('The size of tensor a (8) must match')\n"
    )
    check = failure_check(1, RuntimeError(text), None, failed=[], traced=None, is_of_compiler=True)
    expected = "RuntimeError: RuntimeError when making fake tensor call: The size of tensor a (8) must match"
    assert (check.observed, check.ranks) == (expected, (1,))
