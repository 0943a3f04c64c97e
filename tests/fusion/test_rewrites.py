"""Rewrites of graphs: what is taken out, and what is left alone; the names of torch that they look for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tpcompile.fusion import rewrites

aten = torch.ops.aten


def graph_of(function: Callable[..., object], *inputs: Tensor) -> Graph:
    mode = FakeTensorMode()
    graph: Graph = make_fx(function)(*map(mode.from_tensor, inputs)).graph
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.target._overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"]


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("function", "rewrite", "left", "number"),
    [
        (lambda x: x.t().clone(memory_format=torch.contiguous_format), rewrites.without_transposes, ["reshape"], 2),
        (lambda x: x.clone(), rewrites.without_transposes, ["clone"], 0),
        (lambda x: x.transpose(0, 1) + 1, rewrites.with_contiguous_transposes, ["transpose", "clone", "add"], 1),
        (lambda x: x @ x.transpose(0, 1), rewrites.with_contiguous_transposes, ["transpose", "mm"], 0),
        (lambda x: x.view(32).view(8, 4), rewrites.without_view_chains, ["reshape"], 1),
        (lambda x: x.view(4, 8) + 1, rewrites.without_view_chains, ["add"], 1),
        (lambda x: x.view(32) + 1, rewrites.without_view_chains, ["view", "add"], 0),
        (lambda x: x.double() + 1, rewrites.without_casts, ["add"], 1),
        (lambda x: x + 1, rewrites.without_casts, ["add"], 0),
    ],
)
def test_a_rewrite_takes_its_ops_out_and_no_others(
    function: Callable[[Tensor], object], rewrite: rewrites.Rewrite, left: list[str], number: int
) -> None:
    graph = graph_of(function, X)
    assert len(rewrite(graph)) == number
    graph.eliminate_dead_code()
    graph.lint()
    used = [name for name in ops(graph) if name in left]
    assert used == left


def test_a_look_changes_nothing_and_finds_what_would_be_taken_out() -> None:
    graph = graph_of(lambda x: x.double() + 1, X)
    before = str(graph)
    looking = rewrites.LookingPass({"casts": rewrites.without_casts, "exchanges": rewrites.without_collectives})
    looking(graph)
    assert str(graph) == before
    assert looking.present == {"casts"}


def test_a_copy_to_a_different_device_is_no_cast() -> None:
    graph = graph_of(lambda x: aten._to_copy(x, device="meta", dtype=torch.float64), X)
    assert rewrites.without_casts(graph) == []


def test_what_is_written_into_an_input_is_returned_and_a_copy_into_a_buffer_stays() -> None:
    graph = graph_of(lambda x: (x * 2, x.copy_(x + 1)), X)
    assert len(rewrites.without_copies_into_inputs(graph)) == 1
    assert "copy_" not in ops(graph)
    assert len(next(node for node in graph.nodes if node.op == "output").args[0]) == 3
    inside = graph_of(lambda x: aten.copy_(torch.zeros_like(x), x), X)
    assert rewrites.without_copies_into_inputs(inside) == []


def test_a_custom_op_of_a_different_shape_stays() -> None:
    @torch.library.custom_op("tpcompile_rewrites::rows", mutates_args=())
    def rows(x: Tensor) -> Tensor:
        return x[:, 0].clone()

    @rows.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0])

    graph = graph_of(lambda x: rows(x) + 1, X)
    assert rewrites.without_custom_ops(graph) == []
    assert "rows" in ops(graph)


@pytest.mark.parametrize(
    "name", ["auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional", "with_effects"]
)
def test_wrappers_of_ops_are_there(name: str) -> None:
    assert hasattr(torch.ops.higher_order, name)


@pytest.mark.parametrize("name", ["convert_element_type", "_sink_tokens"])
def test_prims_are_there(name: str) -> None:
    assert hasattr(torch.ops.prims, name)


def test_the_hook_is_there() -> None:
    from torch._inductor import config

    assert hasattr(config, "post_grad_custom_pre_pass")
