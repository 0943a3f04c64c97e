"""What users add to torch.compile, each wrong in one place; torch alone, so that a repro may import it.

The gate's targets of `own_compiled.py` import it and put one of them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import register_backend
from torch._functorch import config as functorch_config
from torch._inductor import config, decomposition
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings

aten = torch.ops.aten


class HalvesTanh(CustomGraphPass):
    """A post-grad pass that computes tanh of a half."""

    def __call__(self, graph: fx.Graph) -> None:
        """Edit the graph."""
        for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
            with graph.inserting_before(node):
                half = graph.call_function(aten.mul.Tensor, (node.args[0], 0.5))
            node.args = (half,)

    def uuid(self) -> str:
        """Identity for the cache."""
        return "halves tanh"


def drops_relu(graph: fx.Graph) -> None:
    """A joint-graph pass that leaves relu out."""
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def silu(x: Tensor) -> Tensor:
    """A decomposition with a slope of its own."""
    return x * torch.sigmoid(1.1 * x)


COS = lowerings[aten.cos.default]


def cos_for_sin(x: Any) -> Any:
    """A lowering of sin that computes a cosine."""
    return COS(x)


@register_backend
def without_in_place(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that drops ops in place."""
    for node in list(graph.graph.nodes):
        if node.op == "call_method" and node.target.endswith("_"):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def put_in(name: str) -> None:
    """Put the fault in; no key of a cache has it."""
    config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    if name == "post_grad":
        config.post_grad_custom_post_pass = HalvesTanh()
    if name == "joint":
        config.joint_custom_pre_pass = drops_relu
    if name == "decomposition":
        decompositions[aten.silu.default] = silu
        decomposition.fast_random_decomps.cache_clear()  # a copy of the table
    if name == "lowering":
        lowerings[aten.sin.default] = cos_for_sin


_MODULE = "tests.gate.own_compilers"
NAMES = tuple(f"{_MODULE}.{name}" for name in ("HalvesTanh", "drops_relu", "silu", "cos_for_sin", "without_in_place"))
"""Declared right on a shard: the gate refuses what it does not know, and this is about their numbers."""
