"""Code that is generated and not compiled needs these names of torch."""

from __future__ import annotations

import inspect

import pytest
import torch

from tpcompile.torch_api import generated


@pytest.mark.parametrize("name", ["triton", "cpp_pybinding"])
def test_kernels_are_compiled_there(name: str) -> None:
    from torch._inductor.async_compile import AsyncCompile

    original = getattr(AsyncCompile, name)
    with generated.uncompiled_kernels():
        assert getattr(AsyncCompile, name) is not original
    assert getattr(AsyncCompile, name) is original


@pytest.mark.parametrize("name", ["inner_compile", "config_patches"])
def test_what_runs_can_be_given(name: str) -> None:
    from torch._inductor.compile_fx import compile_fx

    assert name in inspect.signature(compile_fx).parameters


@pytest.mark.slow
def test_a_size_that_is_marked_as_dynamic_is_a_constant_of_the_graph(fresh_compiler: None) -> None:
    shapes: list[torch.Size] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        shapes.extend(node.meta["example_value"].shape for node in graph.graph.nodes if node.op == "placeholder")
        return graph.forward

    x = torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with generated.static_shapes({"x": [x]}):
        torch.compile(lambda x: x + 1, backend=backend)(x)
    assert shapes == [(4, 8)]
