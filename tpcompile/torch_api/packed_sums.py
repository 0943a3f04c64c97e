"""Small sums that only leave the graph, as gradients of replicated weights do -> one sum of all of them.

    x = wait_tensor(all_reduce(a, "sum", group))        z = wait_tensor(all_reduce(cat([a, b]), "sum", group))
    y = wait_tensor(all_reduce(b, "sum", group))        x, y = z[: a.numel()].clone(), z[a.numel() :].clone()
    return x.to(dtype), y                               return x.to(dtype), y

Each of them takes as long as the ranks need to meet, whatever its size. Between a sum and the output may be ops of ATen
that read nothing else, such as a cast. The order of all other collectives is as it was.

    name                                    why
    ops._c10d_functional.all_reduce, wait_tensor    what is packed
    Node.meta["val"]                        fake tensors of the graph

Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_packed_sums.py` fails when one of the names moves. Inductor's own
`bucket_all_reduces_fx` packs neighbours of all sizes, and waits for a bucket where its first sum was waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from tpcompile.torch_api.pushed_sums import called_before, only_wait, ops, put_in_place_of, summed

aten = torch.ops.aten
_MOST_BYTES = 2**20
"""Of a sum that is packed."""


def pack(graph: Graph) -> None:
    """In place, the sums of each group and dtype where the last of them starts."""
    alike: dict[tuple[str, torch.dtype, torch.device], list[Node]] = defaultdict(list)
    for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
        value = summed(start)
        if value is not None and _is_small(value) and _only_leaves(start):
            alike[str(start.args[2]), value.dtype, value.device].append(start)
    for starts in alike.values():
        if len(starts) > 1:
            _pack(starts)


def _is_small(value: torch.Tensor) -> bool:
    is_known = all(isinstance(size, int) for size in value.shape)
    return is_known and value.numel() * value.itemsize <= _MOST_BYTES


def _only_leaves(start: Node) -> bool:
    """Whether the sum reaches the output, and nothing that reads a second tensor or communicates."""
    wait = only_wait(start)
    return wait is not None and all(_is_local(node) and len(node.all_input_nodes) == 1 for node in _behind(wait))


def _is_local(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")


def _behind(start: Node) -> Iterator[Node]:
    """What is computed from it, before the output."""
    for user in start.users:
        if user.op != "output":
            yield user
            yield from _behind(user)


def _pack(starts: list[Node]) -> None:
    """Of one group, in the order of the graph."""
    last = starts[-1]
    moved = {start: list(_behind(start)) for start in starts}
    place = last.next
    while any(place in nodes for nodes in moved.values()):
        place = place.next
    flat = [called_before(place, start, aten.reshape.default, (start.args[0], [-1])) for start in starts]
    joined = called_before(place, last, aten.cat.default, (flat,))
    started = called_before(place, last, ops.all_reduce.default, (joined, *last.args[1:]))
    total = called_before(place, last, ops.wait_tensor.default, (started,))
    begins = 0
    for start, (wait, *behind) in moved.items():
        value = start.meta["val"]
        part = called_before(place, start, aten.slice.Tensor, (total, 0, begins, begins + value.numel()))
        shaped = called_before(place, start, aten.reshape.default, (part, list(value.shape)))
        begins += value.numel()
        for node in (wait, *behind):
            place.prepend(node)
        put_in_place_of(wait, aten.clone.default, (shaped,))
        start.graph.erase_node(start)
