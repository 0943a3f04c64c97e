"""Private names of torch stay in tpcompile/torch_api, by ruff; each of its modules is in the index and has a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tpcompile import torch_api

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
        "import torch\n\ntorch.ops._c10d_functional.wait_tensor\n",
        "import torch.distributed._symmetric_memory as symm\n",
        "from torch.distributed.tensor._dtensor_spec import DTensorSpec\n",
        "from torch.fx.experimental.proxy_tensor import make_fx\n",
    ],
)
def test_a_private_name_is_refused_outside_of_torch_api(code: str) -> None:
    assert len(banned(code, "tpcompile/nn/mlp.py")) == 1
    assert banned(code, "tpcompile/torch_api/compiler.py") == []


def test_public_names_are_free() -> None:
    assert banned("import torch\n\ntorch.compiler.reset()\n", "tpcompile/nn/mlp.py") == []


def test_every_module_of_torch_api_is_in_the_index_and_has_a_test() -> None:
    folder = Path(torch_api.__path__[0])
    modules = sorted(file.name for file in folder.glob("*.py") if file.name != "__init__.py")
    listed = [line.split()[0] for line in str(torch_api.__doc__).splitlines() if line.split()[:1] and ".py " in line]
    tested = [file.name.removeprefix("test_") for file in Path(__file__).parent.glob("test_*.py")]
    assert listed == modules
    assert set(modules) <= set(tested)
