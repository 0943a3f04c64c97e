"""A GPU that computes nothing, in a process of its own; tests/fusion/test_no_gpu.py compiles for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT
from tpcompile.fusion import no_gpu

PROGRAM = """
from tpcompile.fusion.no_gpu import pretend
pretend("sm_90")
import torch
from torch import nn
from tpcompile.torch_api import no_gpu

with no_gpu.empty_tensors():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model = model.to("cuda", torch.bfloat16)
    x = torch.ones(2, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    q_BHSd = torch.empty(1, 2, 8, 4, device="cuda")
    attended = nn.functional.scaled_dot_product_attention(q_BHSd, q_BHSd, q_BHSd)  # the first one: it raised in 2.11
print(torch.cuda.is_available(), torch.cuda.get_device_capability(), gradient.device, gradient.dtype)
print(model[1].weight is model[0].weight, isinstance(model[0].weight, nn.Parameter), attended.device)
"""


def test_each_installed_torch_has_a_library_of_its_own(tmp_path: Path) -> None:
    """Two environments with one version of torch: that of the first is of no use once the first is removed."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "version.py").write_text("__version__ = '2.13.0'")
    first, second = map(no_gpu._library, folders)
    assert first != second
    assert no_gpu._library(folders[0]) == first


@pytest.mark.slow
@pytest.mark.ranks
def test_modules_move_to_it_and_autograd_runs_on_it() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == ["True (9, 0) cuda:0 torch.bfloat16", "True True cuda:0"], ended.stderr
