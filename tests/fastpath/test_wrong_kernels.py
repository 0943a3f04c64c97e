"""Faults that people make in fused kernels, one at a time in each kernel that ships: a case of its trial shows each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_named_fault_is_caught_and_the_right_kernels_pass_the_same_cases() -> None:
    """A raise, a crash and a write outside of the outputs count as caught."""
    command = [sys.executable, "-m", "tests.fastpath.wrong_kernels"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found["right"].values()) == {True}, found["right"]
    assert [fault for fault, outcome in found["wrong"].items() if outcome is True] == []
    assert len(found["wrong"]) == 42
