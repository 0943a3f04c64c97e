"""Graphs that Inductor lowers -> the same with ops of ours in place of an all-reduce and its wait.

    name                                    why
    config.post_grad_custom_post_pass       the graph behind AOTAutograd, functional, before Inductor works in place
    ops._c10d_functional.all_reduce, wait_tensor    what is replaced
    custom_graph_pass.CustomGraphPass       a pass with an identity, which Inductor's caches make part of their keys
    custom_graph_pass.get_hash_for_files    of the pass itself: a cache outlives a release

Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_replaced_sums.py` fails when one of the names moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from tpcompile.torch_api import packed_sums, pushed_sums
from tpcompile.torch_api.packed_sums import pack
from tpcompile.torch_api.pushed_sums import Pushing, ops, push, put_in_place_of, summed

OPTION = "post_grad_custom_post_pass"
"""Of torch.compile: where Inductor takes the pass."""


class Chooser(Protocol):
    """What decides which sums are replaced."""

    def rows_for(self, x: Tensor, group_name: str) -> str:
        """The second argument of the op, empty to leave the sum of this fake tensor as it is."""
        ...

    def pushes(self, x: Tensor, group_name: str) -> bool:
        """Whether a sum of this fake tensor that has work beside it becomes the ops of `pushing`."""
        ...

    def identity(self) -> Any:
        """Equal when it decides alike, for all groups of this process."""
        ...


class ReplacingPass(CustomGraphPass):
    """Packs small sums; replaces those in flight by the ops of `pushing`, and others by `op(x, rows, group name)`."""

    def __init__(self, op: Callable[..., Tensor], chooser: Chooser, *, pushing: Pushing | None = None) -> None:
        self._op, self._chooser, self._pushing = op, chooser, pushing

    def __call__(self, graph: Graph) -> None:
        """Edit the graph in place."""
        pack(graph)
        if self._pushing is not None:
            push(graph, self._pushing, self._chooser.pushes)
        for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
            self._replace(start)

    def uuid(self) -> Any:
        """Code is cached for these files, the ops and what the chooser decides."""
        files = get_hash_for_files((__file__, packed_sums.__file__, pushed_sums.__file__))
        return ("tpcompile", files, str(self._op), str(self._pushing), self._chooser.identity())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacingPass:
        """torch.compile copies its settings; groups cannot be copied."""
        return self

    def _replace(self, start: Node) -> None:
        wait, value = _wait_behind(start), summed(start)
        if wait is None or value is None:
            return
        x, _, group_name = start.args
        rows = self._chooser.rows_for(value, str(group_name))
        if rows:
            put_in_place_of(wait, self._op, (x, rows, group_name))
            start.graph.erase_node(start)


def _wait_behind(start: Node) -> Node | None:
    """The wait that follows at once; None where something may run beside the collective."""
    following = start.next
    is_wait = following.op == "call_function" and following.target == ops.wait_tensor.default
    return following if is_wait and list(start.users) == [following] else None
