"""Sums of a graph that have work beside them -> ops that send, receive and release what two ranks exchange.

    pending = all_reduce(x, "sum", group)       started = START(x, before, slot, number of slots, is the first, group)
    work                                        work
    y = wait_tensor(pending)                    part = RECEIVE([before, work], elements, dtype, slot, group)
                                                y = x + part[: x.numel()].view(x.shape)
    h = f(y)                                    h = f(y)
                                                RELEASE(h, before)

A sum starts right behind the product that it is of, and that behind what it is computed from or the start before. Where
no other product is beside it then, x = a @ b and its start are one:

    x = a @ b                               x = PRODUCT(a, b, before, slot, number of slots, is the first, group)
    y = wait_tensor(all_reduce(x, ...))     part = RECEIVE([before], elements, dtype, slot, group)
                                            y = x + part

`h` is the last result through which alone `y` is read, by pointwise ops: Inductor writes it, since an op takes it, and
makes one kernel of the addition and `f`. `before` is the one of these ops before, so no pass can change their order.
What they do is in `tpcompile.by_size.in_flight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tpcompile.torch_api.c10d import ops
from tpcompile.torch_api.passes import OpOverload

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._addmm_activation.default)
"""Work that takes long enough to hide a sum."""
_VIEWS = (aten.view.default, aten.reshape.default)
_LAYOUTS = (*_VIEWS, aten.permute.default, aten.t.default)
"""Ops that may be between a product and what it is computed from."""
_MOST_IN_FLIGHT = 4
"""Sums of a group at a time that are pushed: each takes the memory of two messages."""
_KEPT = ("val", "tensor_meta", "stack_trace", "nn_module_stack")
"""Metadata that a new node takes over: the arguments in eager, which are there too, are those of the replaced op."""


class Pushing(NamedTuple):
    """The ops of a pushed sum; the docstring of this module says what each does."""

    start: Callable[..., Tensor]
    product: Callable[..., Tensor]
    receive: Callable[..., Tensor]
    release: Callable[..., Tensor]


@dataclass(frozen=True)
class InFlight:
    """A sum with work beside it: its start, its wait and the last node by which it is read, and their places.

    `product` is what is summed, where the sum can be in flight only beside that.
    """

    start: Node
    wait: Node
    read: Node
    starts_at: int
    ends_at: int
    read_at: int
    product: Node | None = None


def push(graph: Graph, pushing: Pushing, is_wanted: Callable[[Tensor, str], bool]) -> None:
    """Replace, in place, the sums in flight of the groups for which `is_wanted(fake tensor, group name)`.

    Those of a group stay as they are where they are not read in the order of their starts, or too many are in flight.
    """
    for sums in _in_flight(graph, is_wanted).values():
        read_at_once = [replace(one, read=one.wait, read_at=one.ends_at) for one in sums]
        for form in (sums, read_at_once):
            reads = [one.read_at for one in form]
            are_in_order = reads == sorted(reads)
            if are_in_order and _max_in_flight(form) <= _MOST_IN_FLIGHT:
                _insert_ops(form, pushing)
                break


def _in_flight(graph: Graph, is_wanted: Callable[[Tensor, str], bool]) -> dict[str, list[InFlight]]:
    """Group name -> its sums that can be pushed, in the order of their starts."""
    waits = {}
    for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
        wait, value = only_wait(start), summed(start)
        if wait is not None and value is not None and is_wanted(value, str(start.args[2])):
            waits[start] = wait
    is_in_flight = {start: wait is not start.next for start, wait in waits.items()}
    before: list[Node] = []
    for start in waits:
        _hoist(start, before)
        before = [start]
    place = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[str, list[InFlight]] = {}
    for start, wait in waits.items():
        read = _read_through(wait)
        product = None if _product_before(wait, start) else _product_of(start)
        if product or is_in_flight[start] or _product_before(wait, start):
            one = InFlight(start, wait, read, place[start], place[wait], place[read], product)
            found.setdefault(str(start.args[2]), []).append(one)
    return found


def _hoist(start: Node, before: list[Node]) -> None:
    """Move a start, with the product that is summed and the views between, right behind what that is computed from.

    Autograd computes the gradient of the weight before or behind that of the input; it is beside the sum then. `before`
    stays before it, the start before: sums that are not read in the order of their starts are not pushed.
    """
    moved = {start}
    x = start.args[0]
    while _is_view(x):
        moved.add(x)
        x = x.args[0]
    if x.target is aten.mm.default:
        moved.add(x)
        for source in x.args:
            while source.target in _LAYOUTS:
                moved.add(source)
                source = source.args[0]
    sources = {given for node in moved for given in node.all_input_nodes} - moved
    behind = max([*before, *sources, *start.graph.find_nodes(op="placeholder")])
    for node in sorted(moved, reverse=True):
        if behind < node:
            behind.append(node)


def _product_of(start: Node) -> Node | None:
    """The product that is summed, where nothing else reads it and nothing but views is between."""
    x, behind = start.args[0], start
    while _is_view(x) and x is behind.prev:
        x, behind = x.args[0], x
    is_product = x.target is aten.mm.default
    is_right_before = x is behind.prev
    is_read_once = len(x.users) == 1
    return x if is_product and is_right_before and is_read_once else None


def _is_view(node: Node) -> bool:
    """True for a view that only one node reads."""
    return node.target in _VIEWS and len(node.users) == 1


def _max_in_flight(sums: list[InFlight]) -> int:
    """Number of sums that are in flight, or not yet read, behind the start of one of them, at most."""
    return max(sum(other.starts_at <= one.starts_at < other.read_at for other in sums) for one in sums)


def _insert_ops(sums: list[InFlight], pushing: Pushing) -> None:
    """Put the ops in place of the sums, each behind the one before it."""
    num_slots = 2 * _max_in_flight(sums)
    moments = [(one.starts_at, number, "start") for number, one in enumerate(sums)]
    moments += [(one.ends_at, number, "receive") for number, one in enumerate(sums)]
    moments += [(one.read_at, number, "release") for number, one in enumerate(sums)]
    total: dict[Node, Node] = {}
    before: list[Node] = []
    for _place, number, kind in sorted(moments)[:-1]:  # nothing is behind the last release
        one, slot = sums[number], number % num_slots
        group_name = one.start.args[2]
        if kind == "start":
            arguments: tuple[Any, ...] = (before, slot, num_slots, number == 0, group_name)
            if one.product is None:
                made = insert_call(one.start, one.start, pushing.start, (one.start.args[0], *arguments))
            else:  # the op is in place of the product
                made = replace_by_call(one.product, pushing.product, (*one.product.args, *arguments))
        elif kind == "receive":
            after = [*before, *_product_before(one.wait, one.start)]
            value = one.wait.meta["val"]
            arguments = (after, value.numel(), value.dtype, slot, group_name)
            made = insert_call(one.wait, one.wait, pushing.receive, arguments)
            total[one.wait] = _insert_sum(one, made)
        else:
            read = total.get(one.read, one.read)
            made = insert_call(max(read, *before).next, read, pushing.release, (read, before))
        before = [made]


def _insert_sum(one: InFlight, received: Node) -> Node:
    x, wait = one.start.args[0], one.wait
    value = wait.meta["val"]
    flat = insert_call(wait, wait, aten.slice.Tensor, (received, 0, 0, value.numel()))
    part = insert_call(wait, wait, aten.view.default, (flat, list(value.shape)))
    made = replace_by_call(wait, aten.add.Tensor, (x, part))
    wait.graph.erase_node(one.start)
    return made


def _read_through(wait: Node) -> Node:
    """The last node by which the sum is read, or the one before that is smaller: it is written to memory."""
    node = smallest = wait
    while len(node.users) == 1 and _is_pointwise(following := next(iter(node.users)), node):
        node = following
        if node.meta["val"].itemsize <= smallest.meta["val"].itemsize:
            smallest = node
    return smallest


def _is_pointwise(node: Node, given: Node) -> bool:
    """True when each element of the node is computed from one element of `given`."""
    value, target = node.meta.get("val"), node.target
    is_one = isinstance(value, Tensor) and value.numel() == given.meta["val"].numel()
    is_op = isinstance(target, OpOverload)
    return is_one and is_op and (torch.Tag.pointwise in target.tags or target in _VIEWS)


def summed(start: Node) -> Tensor | None:
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


def only_wait(start: Node) -> Node | None:
    """The wait for a collective that nothing else reads."""
    users = list(start.users)
    is_wait = len(users) == 1 and users[0].op == "call_function" and users[0].target == ops.wait_tensor.default
    return users[0] if is_wait else None


def insert_call(place: Node, like: Node, op: Callable[..., Any], arguments: tuple[Any, ...]) -> Node:
    """A call of an op before `place`, with the line of `like`."""
    with place.graph.inserting_before(place):
        made: Node = place.graph.call_function(op, arguments)
    _copy_metadata(made, like, _KEPT[2:])
    made.meta["val"] = op(*map_arg(arguments, lambda node: node.meta["val"]))
    return made


def replace_by_call(wait: Node, op: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Node:
    """A call of an op whose result is that of the wait."""
    with wait.graph.inserting_before(wait):
        made: Node = wait.graph.call_function(op, arguments)
    _copy_metadata(made, wait, _KEPT)
    wait.replace_all_uses_with(made)
    wait.graph.erase_node(wait)
    return made


def _copy_metadata(made: Node, like: Node, keys: tuple[str, ...]) -> None:
    made.meta.update({key: like.meta[key] for key in keys if key in like.meta})
