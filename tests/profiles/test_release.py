"""CUDA graphs are released before the process group of their collectives ends, and before Python does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_python

HOLDER = """
import torch.distributed as dist
from tpcompile.profiles.graphed import Graphed

class Holder(Graphed):
    def release(self):
        print("released while the group exists:", dist.is_initialized(), flush=True)

holder = Holder(None, None, label="", ranks=None)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
"""
RELEASED = "released while the group exists: True"


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass  # the last line of the program"])
def test_they_are_released_first(end: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HOLDER + end)
    ended = run_python([program])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == RELEASED
