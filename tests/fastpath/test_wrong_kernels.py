"""Faults that people make in fused kernels, one at a time in each kernel that ships: a case of its trial shows each."""

from __future__ import annotations

import json
import os

import pytest

from tests.forked import ROOT, run_python

pytest.importorskip("triton")

EXCHANGES = 34
STEP = 1 if len(os.sched_getaffinity(0)) >= 8 else 8
"""Ranks in the interpreter that wait in vain: all these take two minutes of two cores, so there a sample is run."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("module", "arguments", "number"),
    [("wrong_kernels", (), 46), ("wrong_exchanges", (str(STEP),), len(range(0, EXCHANGES, STEP)))],
)
def test_every_named_fault_is_caught_and_the_right_kernels_pass_the_same_cases(
    module: str, arguments: tuple[str, ...], number: int
) -> None:
    """A raise, a crash, a rank that waits in vain and a write outside of the outputs count as caught."""
    command = ["-m", f"tests.fastpath.{module}", *arguments]
    ended = run_python(command, environ={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, timeout_s=800)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found["right"].values()) == {True}, found["right"]
    assert [fault for fault, outcome in found["wrong"].items() if outcome is True] == []
    assert len(found["wrong"]) == number
