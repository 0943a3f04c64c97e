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
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

ops = torch.ops._c10d_functional
OPTION = "post_grad_custom_post_pass"
"""Of torch.compile: where Inductor takes the pass."""


_KEPT = ("val", "tensor_meta", "stack_trace", "nn_module_stack")
"""What the new node takes over; the arguments that eager saw, which are there too, are those of a different op."""


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
"""Work that takes long enough to hide a sum."""
_MOST_IN_FLIGHT = 4
"""Sums of a group at a time that are pushed: each takes the memory of two messages."""


class Chooser(Protocol):
    """What decides which sums are replaced."""

    def rows_for(self, x: Tensor, group_name: str) -> str:
        """The second argument of the op, empty to leave the sum of this fake tensor as it is."""
        ...

    def pushes(self, x: Tensor, group_name: str) -> bool:
        """Whether a sum of this fake tensor that has work beside it becomes the two ops of `pushing`."""
        ...

    def identity(self) -> Any:
        """Equal when it decides alike, for all groups of this process."""
        ...


class ReplacingPass(CustomGraphPass):
    """Replaces sums of contiguous tensors by `op(x, rows, group name)`, and those in flight by two ops.

    Of `pushing`, the first takes (x, results that come before, slot, number of slots, whether it is the first, group
    name), the second (what the first gives, x, results that come before, slot, group name): see
    `tpcompile.by_size.in_flight`.
    """

    def __init__(
        self, op: Callable[..., Tensor], chooser: Chooser, *, pushing: tuple[Callable[..., Tensor], ...] = ()
    ) -> None:
        self._op, self._chooser, self._pushing = op, chooser, pushing

    def __call__(self, graph: Graph) -> None:
        """Edit the graph in place."""
        for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
            self._replace(start)
        if self._pushing:
            for sums in self._in_flight(graph).values():
                self._push(graph, sums)

    def uuid(self) -> Any:
        """Code is cached for this file, the ops and what the chooser decides."""
        ops_of_graph = map(str, (self._op, *self._pushing))
        return ("tpcompile", get_hash_for_files((__file__,)), *ops_of_graph, self._chooser.identity())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacingPass:
        """torch.compile copies its settings; groups cannot be copied."""
        return self

    def _replace(self, start: Node) -> None:
        wait, value = _wait_behind(start), _summed(start)
        if wait is None or value is None:
            return
        x, _, group_name = start.args
        rows = self._chooser.rows_for(value, str(group_name))
        if rows:
            _put_in_place_of(wait, self._op, (x, rows, group_name))
            start.graph.erase_node(start)

    def _in_flight(self, graph: Graph) -> dict[str, list[_InFlight]]:
        """The sums of each group that have work beside them, in the order of their starts."""
        place = {node: number for number, node in enumerate(graph.nodes)}
        found: dict[str, list[_InFlight]] = {}
        for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
            wait, value, group_name = _only_wait(start), _summed(start), str(start.args[2])
            if wait is not None and value is not None and self._chooser.pushes(value, group_name):
                found.setdefault(group_name, []).append(_InFlight(start, wait, place[start], place[wait]))
        return found

    def _push(self, graph: Graph, sums: list[_InFlight]) -> None:
        """Each op behind the one before it.

        Nothing where sums do not end in the order of their starts, or too many are in flight.
        """
        ends = [one.ends_at for one in sums]
        num_in_flight = max(sum(other.is_open_behind(one.starts_at) for other in sums) for one in sums)
        if ends != sorted(ends) or num_in_flight > _MOST_IN_FLIGHT:
            return
        num_slots = 2 * num_in_flight
        moments = [(one.starts_at, number, True) for number, one in enumerate(sums)]
        moments += [(one.ends_at, number, False) for number, one in enumerate(sums)]
        started: dict[int, Node] = {}
        before: list[Node] = []
        for _, number, is_start in sorted(moments):
            start, wait = sums[number].start, sums[number].wait
            x, _, group_name = start.args
            slot = number % num_slots
            if is_start:
                with graph.inserting_before(start):
                    made = _like(start, self._pushing[0], (x, before, slot, num_slots, number == 0, group_name))
                made.meta["val"] = made.meta["val"].new_empty(0)
                started[number] = made
            else:
                after = [*before, *_product_before(wait, start)]
                made = _put_in_place_of(wait, self._pushing[1], (started[number], x, after, slot, group_name))
                graph.erase_node(start)
            before = [made]


@dataclass(frozen=True)
class _InFlight:
    """A sum with work beside it: its start and its wait, and where they are in the graph."""

    start: Node
    wait: Node
    starts_at: int
    ends_at: int

    def is_open_behind(self, place: int) -> bool:
        """Whether it is in flight behind the node at that place."""
        return self.starts_at <= place < self.ends_at


def _summed(start: Node) -> Tensor | None:
    """The fake tensor that is summed; None for a different reduction, and for one that is not contiguous."""
    x, reduce_op, _ = start.args
    value = x.meta["val"] if isinstance(x, Node) and reduce_op == "sum" else None
    return value if value is not None and value.is_contiguous() else None


def _product_before(wait: Node, start: Node) -> list[Node]:
    """The last matrix product between the two: it hides the sum, if the wait does not come before it."""
    node = wait.prev
    while node is not start:
        if node.target in _PRODUCTS:
            return [node]
        node = node.prev
    return []


def _only_wait(start: Node) -> Node | None:
    """The wait for a collective that nothing else reads, and that has work beside it."""
    users = list(start.users)
    is_wait = len(users) == 1 and users[0].op == "call_function" and users[0].target == ops.wait_tensor.default
    return users[0] if is_wait and users[0] is not start.next else None


def _wait_behind(start: Node) -> Node | None:
    """The wait that follows at once; None where something may run beside the collective."""
    following = start.next
    is_wait = following.op == "call_function" and following.target == ops.wait_tensor.default
    return following if is_wait and list(start.users) == [following] else None


def _like(node: Node, op: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Node:
    """A call of an op that takes over what is known of a node."""
    made: Node = node.graph.call_function(op, arguments)
    made.meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
    return made


def _put_in_place_of(wait: Node, op: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Node:
    """A call of an op whose result is that of the wait."""
    with wait.graph.inserting_before(wait):
        made = _like(wait, op, arguments)
    wait.replace_all_uses_with(made)
    wait.graph.erase_node(wait)
    return made
