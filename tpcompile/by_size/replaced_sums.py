"""Graphs that Inductor lowers -> the same with ops of ours in place of an all-reduce and its wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.fx import Graph, Node

from tpcompile.by_size import packed_sums, pushed_sums
from tpcompile.by_size.packed_sums import pack
from tpcompile.by_size.pushed_sums import Pushing, only_wait, push, replace_by_call, summed
from tpcompile.torch_api.c10d import ops
from tpcompile.torch_api.passes import CustomGraphPass, get_hash_for_files


class Chooser(Protocol):
    """What decides which sums are replaced."""

    def rows_for(self, x: Tensor, group_name: str) -> str:
        """The second argument of the op, empty to leave the sum of this fake tensor as it is."""
        ...

    def pushes(self, x: Tensor, group_name: str) -> bool:
        """True when a sum of this fake tensor that has work beside it becomes the ops of `pushing`."""
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
        wait, value = start.next, summed(start)
        if value is None or only_wait(start) is not wait:  # something may run beside the collective
            return
        x, _, group_name = start.args
        rows = self._chooser.rows_for(value, str(group_name))
        if rows:
            replace_by_call(wait, self._op, (x, rows, group_name))
            start.graph.erase_node(start)
