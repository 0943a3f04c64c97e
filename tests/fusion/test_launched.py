"""Launches as items: what ranks are compared by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fusion import codegen
from tests.fusion.zoo import Program
from tpcompile.evidence.records import Item
from tpcompile.fusion.launched import launched

pytestmark = pytest.mark.slow


def one_result(x: torch.Tensor) -> torch.Tensor:
    return x.relu().sin()


def both_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.relu()
    return y, y.sin()


def launch_of(function: Callable[[torch.Tensor], object]) -> Item:
    (graph,) = codegen.recorded(Program(function, ((64,),))).graphs
    (item,) = launched(graph).launches
    return item


def test_a_buffer_more_that_a_kernel_writes_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    one, both = launch_of(one_result), launch_of(both_results)
    assert one.says == both.says
    assert (one.fields["writes"], both.fields["writes"]) == ("1", "2")
