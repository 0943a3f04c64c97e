"""Every Python block of the README and the pages under docs/, run as it stands on two ranks."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.preflight import Handshake, InputCheck

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
ELSEWHERE = ("check_numerics", "check_types", "head_norm", "Exchange.of_group", "model.next_tokens")
"""Blocks that tests/numerics/test_documented.py and tests/fastpath/test_documented.py run; the last two need
GPUs."""


class Model(nn.Module):
    """What the blocks call `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.attention_backend = "math"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def blocks() -> Iterator[tuple[str, str]]:
    """(page and number, Python) of every block."""
    for page in PAGES:
        for number, part in enumerate(page.read_text().split("```python\n")[1:]):
            yield f"{page.name} #{number}", part.partition("```")[0]


def names() -> dict[str, Any]:
    """What the pages take for granted, on this rank: a mesh, a model, data; alike on all ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Model()
    step = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 8)
    return {
        "torch": torch, "mesh": mesh, "model": model, "tp": mesh.get_group("tp"),
        "step": step, "train_step": step, "batch": x, "batches": [x, x],
        "x": x, "y": x, "s": x, "mask": x > 0, "Handshake": Handshake, "InputCheck": InputCheck,
    }  # fmt: skip


@pytest.mark.tp(world_size=2, timeout_s=250)
def test_every_documented_block_runs_on_two_ranks() -> None:
    """The pages' own assertions are the test."""
    known = names()
    done = []
    for where, text in blocks():
        if any(name in text for name in ELSEWHERE):
            continue
        torch.compiler.reset()
        given = dict(known)
        given["step"] = 7 if "step=step" in text else given["step"]
        linecache.cache[where] = (len(text), None, text.splitlines(keepends=True), where)  # as a notebook does
        exec(compile(text, where, "exec"), given)  # the page's own text
        done.append(where)
    assert len(done) >= 6


def printed_by(program: str) -> str:
    torch.compiler.reset()
    with redirect_stdout(StringIO()) as out:
        exec(program, names())
    return out.getvalue()


@pytest.mark.tp(world_size=2)
def test_the_lines_of_the_readme_for_a_model_of_the_readers_own_print_the_verdict_on_rank_0() -> None:
    (text,) = [text for where, text in blocks() if where.startswith("README") and "verdict.print()" in text]
    is_printed = "PASS (exit 0): 2 ranks agree" in printed_by(text)
    assert is_printed == (dist.get_rank() == 0)
    assert "PASS" not in printed_by(text.replace("verdict.print()", ""))


def test_a_block_that_asserts_in_vain_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "broken.md"
    page.write_text("```python\nassert 1 == 2, 'wrong page'\n```\n")
    monkeypatch.setattr("tests.test_documented.PAGES", (page,))
    ((where, text),) = blocks()
    with pytest.raises(AssertionError, match="wrong page"):
        exec(compile(text, where, "exec"), {})
