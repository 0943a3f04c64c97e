"""The example of docs/tp-maths.md as it stands there, on two ranks; and ranks that draw other inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.rank_jobs import run_on_ranks
from tpcompile import testing
from tpcompile.errors import ConfigError
from tpcompile.nn.linear import ColumnParallelLinear, RowParallelLinear
from tpcompile.ranks import processes
from tpcompile.testing import check_numerics
from tpcompile.typecheck import check_types

DOCS = Path(__file__).resolve().parents[2] / "docs" / "tp-maths.md"


class MyMLP(nn.Module):
    """A correct tensor-parallel MLP, as a reader of the page has one."""

    def __init__(self, width: int, hidden: int, comm: Any) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(width, hidden, bias=True, comm=comm)
        self.down = RowParallelLinear(hidden, width, bias=True, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def blocks() -> list[str]:
    """Python of the page, block by block."""
    parts = DOCS.read_text().split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


def _documented() -> int:
    (found,) = [block for block in blocks() if "check_numerics" in block]
    names: dict[str, Any] = {"torch": torch, "MyMLP": MyMLP, "tp_group": dist.group.WORLD}
    exec(found, names)  # the page's own text
    return len(names["report"].programs)


def _refusals() -> list[str]:
    def by_rank(dtype: torch.dtype) -> tuple[Tensor]:
        return (torch.full((2, 64), float(dist.get_rank()), dtype=dtype),)

    def by_length(dtype: torch.dtype) -> tuple[Tensor]:
        return (torch.ones(2 + dist.get_rank(), 64, dtype=dtype),)

    found = []
    for inputs in (by_rank, by_length):
        with pytest.raises(ConfigError) as refused:
            check_numerics(
                lambda comm: MyMLP(64, 256, comm), inputs=inputs, group=dist.group.WORLD, programs=("eager",)
            )
        found.append(str(refused.value))
    return found


def test_the_documented_comparison_passes_on_a_correct_module() -> None:
    assert run_on_ranks(_documented, timeout_s=200) == [12, 12]


def test_the_public_start_of_ranks_is_the_one_that_other_tests_spawn_ranks_with() -> None:
    assert testing.run_on_ranks is processes.run_on_ranks


def test_inputs_that_differ_between_ranks_are_refused_on_all_ranks_alike() -> None:
    first, second = run_on_ranks(_refusals)
    assert first == second
    assert first[0].startswith("inputs differ between ranks: input is float32[2, 64] ")
    assert " on rank 0; float32[2, 64] " in first[0] and " on rank 1. Every rank gives the full tensors" in first[0]
    assert "float32[2, 64]" in first[1] and "float32[3, 64]" in first[1]


def test_the_documented_type_check_passes_on_a_correct_module() -> None:
    (found,) = [block for block in blocks() if "check_types" in block]
    exec(found, {"check_types": check_types, "MyMLP": MyMLP, "x": torch.randn(2, 16, 64)})
