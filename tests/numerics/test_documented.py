"""The examples of docs/tp-maths.md and docs/typecheck.md as they stand there; and ranks that draw other inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile import testing
from tpcompile.errors import ConfigError
from tpcompile.nn.linear import ColumnParallelLinear, RowParallelLinear
from tpcompile.pytest_plugin.fixture import TensorParallel
from tpcompile.ranks import pool
from tpcompile.testing import check_numerics
from tpcompile.typecheck import check_types

DOCS = Path(__file__).resolve().parents[2] / "docs"


class MyMLP(nn.Module):
    """A correct tensor-parallel MLP, as a reader of the page has one."""

    def __init__(self, width: int, hidden: int, comm: Any) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(width, hidden, bias=True, comm=comm)
        self.down = RowParallelLinear(hidden, width, bias=True, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def blocks(page: str) -> list[str]:
    """Python of the page, block by block."""
    parts = (DOCS / page).read_text().split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


@pytest.mark.tp(world_size=2, timeout_s=200)
def test_the_documented_comparison_passes_on_a_correct_module(tp: TensorParallel) -> None:
    (found,) = [block for block in blocks("tp-maths.md") if "check_numerics" in block]
    names: dict[str, Any] = {"torch": torch, "MyMLP": MyMLP, "tp_group": dist.group.WORLD}
    exec(found, names)  # the page's own text
    assert len(names["report"].programs) == 12


def test_the_public_start_of_ranks_is_the_one_that_other_tests_spawn_ranks_with() -> None:
    assert testing.run_on_ranks is pool.run_on_ranks


def _refused(inputs: Callable[[torch.dtype], tuple[Tensor]]) -> str:
    """The refusal of inputs that differ between ranks, which is the same on all of them."""
    with pytest.raises(ConfigError) as refused:
        check_numerics(lambda comm: MyMLP(64, 256, comm), inputs=inputs, group=dist.group.WORLD, programs=("eager",))
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(refused.value))
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.tp(world_size=2)
def test_inputs_with_different_values_are_refused_on_all_ranks_alike(tp: TensorParallel) -> None:
    text = _refused(lambda dtype: (torch.full((2, 64), float(tp.rank), dtype=dtype),))
    assert re.match(r"inputs .*input is float32\[2, 64\] \S+ on rank 0; float32\[2, 64\] \S+ on rank 1\.", text)


@pytest.mark.tp(world_size=2)
def test_inputs_with_different_shapes_are_refused_on_all_ranks_alike(tp: TensorParallel) -> None:
    text = _refused(lambda dtype: (torch.ones(2 + tp.rank, 64, dtype=dtype),))
    assert "float32[2, 64]" in text and "float32[3, 64]" in text


def test_the_documented_type_check_passes_on_a_correct_module() -> None:
    (found,) = [block for block in blocks("typecheck.md") if "check_types" in block]
    exec(found, {"check_types": check_types, "MyMLP": MyMLP, "x": torch.randn(2, 16, 64)})
