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
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import Graph, Node

from tpcompile.by_size.pushed_sums import called_before, only_wait, put_in_place_of, summed
from tpcompile.torch_api.c10d import ops
from tpcompile.torch_api.passes import OpOverload

aten = torch.ops.aten
_MOST_BYTES = 2**20
"""Of one that is packed, and of all that are packed together."""
_WHOLE_BYTES = 16 * 8
"""A vector for each of 8 ranks: of a size that is no multiple, only NCCL takes the sum."""


def pack(graph: Graph) -> None:
    """In place, the sums of each group and dtype where the last of them starts."""
    alike: dict[tuple[str, torch.dtype, torch.device], list[Node]] = defaultdict(list)
    for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
        value = summed(start)
        if value is not None and _is_small(value) and _only_leaves(start):
            alike[str(start.args[2]), value.dtype, value.device].append(start)
    for starts in alike.values():
        for together in _packs(starts):
            if len(together) > 1:
                _pack(together)


def _packs(starts: Iterable[Node]) -> Iterator[list[Node]]:
    """In order, as many as fit."""
    together, size = list[Node](), 0
    for start in starts:
        value = start.meta["val"]
        if size + value.nbytes > _MOST_BYTES:
            yield together
            together, size = [], 0
        together.append(start)
        size += value.nbytes
    yield together


def _is_small(value: torch.Tensor) -> bool:
    is_known = all(isinstance(size, int) for size in value.shape)
    return is_known and value.nbytes <= _MOST_BYTES


def _only_leaves(start: Node) -> bool:
    """Whether the sum reaches the output, and only ops that can be moved: of one tensor, and of nothing else."""
    wait = only_wait(start)
    return wait is not None and all(map(_can_be_moved, _behind(wait)))


def _can_be_moved(node: Node) -> bool:
    """Not where it communicates, draws random numbers or writes in place."""
    op = node.target
    is_of_torch = isinstance(op, OpOverload) and op.namespace in ("aten", "prims")
    return (
        is_of_torch
        and len(node.all_input_nodes) == 1
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
    )


def _behind(start: Node) -> Iterator[Node]:
    """What is computed from it, before the output."""
    found = [start]
    while found:
        for user in found.pop().users:
            if user.op != "output":
                yield user
                found.append(user)


def _pack(starts: list[Node]) -> None:
    """Of one group, in the order of the graph; what reads a sum is moved behind the one of all."""
    moved = {start: list(_behind(start)) for start in starts}
    place = _place_behind(starts[-1], moved)
    total = _sum_of_all(starts, place)
    begins = 0
    for start, (wait, *behind) in moved.items():  # each op behind what it reads
        value = start.meta["val"]
        part = called_before(place, start, aten.slice.Tensor, (total, 0, begins, begins + value.numel()))
        shaped = called_before(place, start, aten.reshape.default, (part, list(value.shape)))
        begins += value.numel()
        for node in (wait, *behind):
            place.prepend(node)
        put_in_place_of(wait, aten.clone.default, (shaped,))
        start.graph.erase_node(start)


def _place_behind(last: Node, moved: Mapping[Node, list[Node]]) -> Node:
    """The first node behind the last start that stays."""
    place = last.next
    while any(place in nodes for nodes in moved.values()):
        place = place.next
    return place


def _sum_of_all(starts: list[Node], place: Node) -> Node:
    """One behind the other, and zeros up to whole vectors."""
    last = starts[-1]
    flat = [called_before(place, start, aten.reshape.default, (start.args[0], [-1])) for start in starts]
    joined = called_before(place, last, aten.cat.default, (flat,))
    value = joined.meta["val"]
    missing = -value.nbytes % _WHOLE_BYTES // value.itemsize
    if missing:
        joined = called_before(place, last, aten.constant_pad_nd.default, (joined, [0, missing]))
    started = called_before(place, last, ops.all_reduce.default, (joined, *last.args[1:]))
    return called_before(place, last, ops.wait_tensor.default, (started,))
