"""A graph with sums, or with the ops in place of them, run for two ranks at a time in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tpcompile.by_size.in_flight import OPS, received_size
from tpcompile.torch_api.c10d import ops

START, PRODUCT, RECEIVE, RELEASE = OPS
RANKS = (0, 1)


def inputs(seed: int) -> list[list[Tensor]]:
    """Of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(8, 8, generator=generator) / 4 for _ in range(3)] for _ in RANKS]


def run_on_both(graph: Graph, given: list[list[Tensor]]) -> list[list[Tensor]]:
    """The results of each rank; what an op sends is there when the other rank receives it, with NaN behind it."""
    values: dict[Node, list[Any]] = {}
    sent: dict[Any, list[Tensor]] = {}
    placeholders = zip(graph.find_nodes(op="placeholder"), zip(*given, strict=True), strict=True)
    values.update({node: list(of_ranks) for node, of_ranks in placeholders})
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = called(
                node, [map_arg(node.args, lambda one, r=rank: values[one][r]) for rank in RANKS], sent
            )
    return [[values[one][rank] for one in graph.output_node().args[0]] for rank in RANKS]


def called(node: Node, args: list[Any], sent: dict[Any, list[Tensor]]) -> list[Any]:
    if node.target is ops.all_reduce.default:
        return [args[0][0] + args[1][0]] * 2
    if node.target is ops.wait_tensor.default:
        return [one[0] for one in args]
    if node.target in (START, PRODUCT):
        slot = args[0][-4], args[0][-1]
        assert slot not in sent, f"{node}: its slot is in flight"
        sent[slot] = [one[0] @ one[1] if node.target is PRODUCT else one[0] for one in args]
        return sent[slot]
    if node.target is RECEIVE:
        _, size, _, *slot = args[0]
        parts = reversed(sent.pop(tuple(slot)))
        return [
            torch.cat([part.reshape(-1), part.new_full((received_size(size) - size,), torch.nan)]) for part in parts
        ]
    if node.target is RELEASE:
        return [None, None]
    return [node.target(*one, **node.kwargs) for one in args]
