"""Private names of torch stay in tpcompile/torch_api: ruff says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def banned(code: str, filename: str) -> list[str]:
    """Names that ruff refuses in that file."""
    pytest.importorskip("ruff", reason="the linter is in the development group only")
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", filename, "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT, check=False)
    return [line for line in done.stdout.splitlines() if "TID251" in line]


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo\n",
        "from torch._inductor import config\n",
        "from torch.distributed import distributed_c10d\n",
        "import torch\n\ntorch._dynamo.reset()\n",
    ],
)
def test_a_private_name_is_refused_outside_of_torch_api(code: str) -> None:
    assert len(banned(code, "tpcompile/nn/mlp.py")) == 1
    assert banned(code, "tpcompile/torch_api/compiler.py") == []


def test_public_names_are_free() -> None:
    assert banned("import torch\n\ntorch.compiler.reset()\n", "tpcompile/nn/mlp.py") == []
