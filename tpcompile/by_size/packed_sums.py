"""Small sums that only leave the graph, as gradients of replicated weights do -> one sum of all of them.

    x = wait_tensor(all_reduce(a, "sum", group))        z = wait_tensor(all_reduce(cat([a, b]), "sum", group))
    y = wait_tensor(all_reduce(b, "sum", group))        x, y = z[: a.numel()].clone(), z[a.numel() :].clone()
    return x.to(dtype), y                               return x.to(dtype), y

Between a sum and the output may be ops of ATen that read nothing else, such as a cast. The order of all other
collectives is as it was. What is packed has at most 1 MiB together, and whole vectors for each rank, which the ops of
by_size need. Inductor's own `bucket_all_reduces_fx` packs neighbours of all sizes, and waits for a bucket where its
first sum was waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node

from tpcompile.by_size.pushed_sums import insert_call, only_wait, replace_by_call, summed
from tpcompile.torch_api.c10d import ops
from tpcompile.torch_api.passes import OpOverload

aten = torch.ops.aten
_MOST_BYTES = 2**20
"""The most that one packed sum, and all sums of one pack together, may have."""
_WHOLE_BYTES = 16 * 8
"""A vector for each of 8 ranks: a sum whose size is no multiple of it can only be NCCL's."""


def pack(graph: Graph) -> None:
    """Edit the graph in place: the sums of each group and dtype become one, where the last of them starts."""
    alike: dict[tuple[str, torch.dtype, torch.device], list[Node]] = defaultdict(list)
    for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
        value, wait = summed(start), only_wait(start)
        if value is None or wait is None:
            continue
        is_known = all(isinstance(size, int) for size in value.shape)
        if not is_known or value.nbytes > _MOST_BYTES:
            continue
        if all(map(_can_be_moved, _behind(wait))):
            alike[str(start.args[2]), value.dtype, value.device].append(start)
    for starts in alike.values():
        for together in _batches(starts):
            if len(together) > 1:
                _pack(together)


def _batches(starts: Iterable[Node]) -> Iterator[list[Node]]:
    """The starts in their order, as many together as `_MOST_BYTES` allows."""
    together, size = list[Node](), 0
    for start in starts:
        value = start.meta["val"]
        if size + value.nbytes > _MOST_BYTES:
            yield together
            together, size = [], 0
        together.append(start)
        size += value.nbytes
    yield together


def _can_be_moved(node: Node) -> bool:
    """True for an op of one tensor that neither communicates, draws random numbers nor writes in place."""
    op = node.target
    is_of_torch = isinstance(op, OpOverload) and op.namespace in ("aten", "prims")
    return (
        is_of_torch
        and len(node.all_input_nodes) == 1
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
    )


def _behind(start: Node) -> Iterator[Node]:
    """The nodes that are computed from this one, without the output."""
    found = [start]
    while found:
        for user in found.pop().users:
            if user.op != "output":
                yield user
                found.append(user)


def _pack(starts: list[Node]) -> None:
    """Replace these sums, of one group and in the order of the graph; what reads them is moved behind their one sum."""
    moved = {start: list(_behind(start)) for start in starts}
    place = starts[-1].next
    while any(place in nodes for nodes in moved.values()):
        place = place.next
    total = _sum_of_all(starts, place)
    begins = 0
    for start, (wait, *behind) in moved.items():  # each op behind what it reads
        value = start.meta["val"]
        part = insert_call(place, start, aten.slice.Tensor, (total, 0, begins, begins + value.numel()))
        shaped = insert_call(place, start, aten.reshape.default, (part, list(value.shape)))
        begins += value.numel()
        for node in (wait, *behind):
            place.prepend(node)
        replace_by_call(wait, aten.clone.default, (shaped,))
        start.graph.erase_node(start)


def _sum_of_all(starts: list[Node], place: Node) -> Node:
    """The wait for the sum of all operands, one behind the other, with zeros up to whole vectors."""
    last = starts[-1]
    flat = [insert_call(place, start, aten.reshape.default, (start.args[0], [-1])) for start in starts]
    joined = insert_call(place, last, aten.cat.default, (flat,))
    value = joined.meta["val"]
    missing = -value.nbytes % _WHOLE_BYTES // value.itemsize
    if missing:
        joined = insert_call(place, last, aten.constant_pad_nd.default, (joined, [0, missing]))
    started = insert_call(place, last, ops.all_reduce.default, (joined, *last.args[1:]))
    return insert_call(place, last, ops.wait_tensor.default, (started,))
