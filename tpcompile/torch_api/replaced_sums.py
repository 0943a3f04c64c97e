"""Graphs that Inductor lowers -> the same with an op of ours in place of an all-reduce and its wait.

    name                                    why
    config.post_grad_custom_post_pass       the graph behind AOTAutograd, functional, before Inductor works in place
    ops._c10d_functional.all_reduce, wait_tensor    what is replaced
    custom_graph_pass.CustomGraphPass       a pass with an identity, which Inductor's caches make part of their keys

Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_replaced_sums.py` fails when one of the names moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

ops = torch.ops._c10d_functional
OPTION = "post_grad_custom_post_pass"
"""Of torch.compile: where Inductor takes the pass."""


_KEPT = ("val", "tensor_meta", "stack_trace", "nn_module_stack")
"""What the new node takes over; the arguments that eager saw, which are there too, are those of a different op."""


class Chooser(Protocol):
    """What decides which sums are replaced."""

    def rows_for(self, x: Tensor, group_name: str) -> str:
        """The second argument of the op, empty to leave the sum of this fake tensor as it is."""
        ...

    def identity(self) -> Any:
        """Equal when it decides alike, for all groups of this process."""
        ...


class ReplacingPass(CustomGraphPass):
    """Replaces sums of contiguous tensors by `op(x, rows, group name)`."""

    def __init__(self, op: Callable[..., Tensor], chooser: Chooser) -> None:
        self._op, self._chooser = op, chooser

    def __call__(self, graph: Graph) -> None:
        """Edit the graph in place."""
        for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
            self._replace(start)

    def uuid(self) -> Any:
        """Code is cached for the op and what the chooser decides."""
        return ("tpcompile", str(self._op), self._chooser.identity())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacingPass:
        """torch.compile copies its settings; groups cannot be copied."""
        return self

    def _replace(self, start: Node) -> None:
        x, reduce_op, group_name = start.args
        wait = _wait_behind(start)
        if wait is None or reduce_op != "sum" or not isinstance(x, Node):
            return
        value = x.meta["val"]
        rows = self._chooser.rows_for(value, str(group_name)) if value.is_contiguous() else ""
        if not rows:
            return
        with start.graph.inserting_before(start):
            node = start.graph.call_function(self._op, (x, rows, group_name))
        node.meta.update({key: wait.meta[key] for key in _KEPT if key in wait.meta})
        wait.replace_all_uses_with(node)
        start.graph.erase_node(wait)
        start.graph.erase_node(start)


def _wait_behind(start: Node) -> Node | None:
    """The wait that follows at once; None where something may run beside the collective."""
    following = start.next
    is_wait = following.op == "call_function" and following.target == ops.wait_tensor.default
    return following if is_wait and list(start.users) == [following] else None
