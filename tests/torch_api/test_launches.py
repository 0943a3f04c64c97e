"""Launches of Triton kernels are seen before they begin, in the interpreter too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked import run_python

triton = pytest.importorskip("triton")

PROGRAM = """
import torch, triton
from tpcompile.torch_api import launches

@triton.jit
def double(pointer):
    triton.language.store(pointer, 2 * triton.language.load(pointer))

seen, x = [], torch.ones(1)
with launches.seen(seen.append):
    double[(1,)](x)
double[(1,)](x)
print(x.item(), [kernel.__name__ for kernel in seen])
"""


def test_a_launch_in_the_interpreter_is_seen_inside_only_and_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run_python([tmp_path / "program.py"], environ={**os.environ, "TRITON_INTERPRET": "1"})
    assert ended.stdout == "4.0 ['double']\n", ended.stderr


def test_what_is_raised_stops_the_launch() -> None:
    from tpcompile.torch_api import launches

    @triton.jit
    def kernel(pointer):
        pass

    def refuse(launched: object) -> None:
        raise ValueError("not here")

    with launches.seen(refuse), pytest.raises(ValueError, match="not here"):
        kernel[(1,)](None)
