"""Private names of torch that the programs of the corpus need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from tests.faults import backends


class _Graph:
    """Functional collectives on a fake group, traced by hand: the passes look at targets only."""

    def __init__(self, *ops: str) -> None:
        self.graph = torch.fx.Graph()
        x = self.graph.placeholder("x")
        x.meta["val"] = torch.empty(8, 4)
        outputs = []
        for op in ops:
            source = self.graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
            args = (source, "sum", "0") if op == "all_reduce" else (source, 2, "0")
            issued = self.graph.call_function(getattr(torch.ops._c10d_functional, op).default, args)
            issued.meta["val"] = torch.empty(8, 4)
            outputs.append(self.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (issued,)))
        self.graph.output(tuple(outputs))

    def ops(self) -> list[str]:
        """Collectives in order."""
        names = [str(node.target).partition(".")[2].partition(".")[0] for node in self.graph.nodes]
        return [name for name in names if name.startswith("all_")]


def test_the_swap_pass_moves_the_gather_in_front_of_the_reduce() -> None:
    traced = _Graph("all_reduce", "all_gather_into_tensor")
    backends.SwapCollectives()(traced.graph)
    traced.graph.lint()
    assert traced.ops() == ["all_gather_into_tensor", "all_reduce"]


def test_the_merge_pass_leaves_one_reduce() -> None:
    traced = _Graph("all_reduce", "all_reduce")
    backends.MergeReduces()(traced.graph)
    traced.graph.lint()
    assert traced.ops() == ["all_reduce"]


def test_aot_eager_is_a_backend_that_can_be_wrapped() -> None:
    called = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        called.append(len(inputs))
        return backends.aot_eager(module, inputs)

    torch.compiler.reset()
    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert called == [1]


@pytest.fixture
def select_algorithm() -> Iterator[Any]:
    """Imported here: every worker collects this file, and the import takes 3 s of CPU time."""
    module = importlib.import_module("torch._inductor.select_algorithm")
    yield module
    module.clear_preprocessing_fns()


def test_autotuning_can_be_made_to_keep_one_kind_of_kernel(
    select_algorithm: Any, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backends.autotune_keeps(extern=True)
    keep = select_algorithm.get_algorithm_selector_cache().preprocessing_fns[-1]
    extern = object.__new__(select_algorithm.ExternKernelCaller)
    assert keep([extern, "template"]) == [extern]
    assert keep(["template"]) == ["template"]


@pytest.mark.skipif(metadata.version("torch") < "2.13", reason="torch 2.13 has it first")
def test_the_spmd_check_of_inductor_can_be_switched_on() -> None:
    settings = inductor_config.aten_distributed_optimizations
    before = (settings.spmd_check, settings.spmd_mismatch, settings.enable_overlap_scheduling)
    try:
        backends.switch_on_spmd_check()
        assert (settings.spmd_check, settings.spmd_mismatch, settings.enable_overlap_scheduling) == (
            True,
            "error",
            True,
        )
    finally:
        settings.spmd_check, settings.spmd_mismatch, settings.enable_overlap_scheduling = before
