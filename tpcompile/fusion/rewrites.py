"""Graphs that Inductor gets -> the same with one kind of op taken out, to see what it costs; the results are wrong.

The graphs are those before Inductor's own passes, where they are functional. Ops as torch 2.11.0 and 2.13.0 name them:

    higher_order.auto_functionalized(_v2)            custom ops in place
    higher_order.with_effects, prims._sink_tokens    ops that are run for what they do
    higher_order.triton_kernel_wrapper_functional    the user's Triton kernels
    aten._to_copy, prims.convert_element_type        casts
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tpcompile.torch_api.c10d import ops as c10d
from tpcompile.torch_api.passes import OpOverload, SharedPass, tree_leaves
from tpcompile.torch_api.scheduled import users_lines

aten, prims, higher_order = torch.ops.aten, torch.ops.prims, torch.ops.higher_order
Rewrite = Callable[[Graph], list[Node]]
"""Changes a graph, and returns the nodes that it took out."""


class _UncachedPass(SharedPass):
    """A custom pass whose graphs are compiled anew: from a cached one it would learn nothing."""

    def uuid(self) -> None:
        """No code of its graphs is cached."""


class RewritingPass(_UncachedPass):
    """A custom pass that applies a rewrite to each graph, and keeps what was taken out as plain fields."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self.found: list[dict[str, Any]] = []

    def __call__(self, graph: Graph) -> None:
        """Edit the graph in place."""
        for node in self._rewrite(graph):
            self.found.append({"op": _name(node), "lines": users_lines([node])})


class LookingPass(_UncachedPass):
    """A custom pass that changes nothing, and finds out which rewrites would take something out."""

    def __init__(self, rewrites: Mapping[Any, Rewrite]) -> None:
        self._rewrites = dict(rewrites)
        self.present: set[Any] = set()

    def __call__(self, graph: Graph) -> None:
        """Try each rewrite on a copy."""
        for name, rewrite in self._rewrites.items():
            if rewrite(copy.deepcopy(graph)):
                self.present.add(name)


_PLACE_OF_OP = {
    higher_order.with_effects: 1,
    higher_order.auto_functionalized: 0,
    higher_order.auto_functionalized_v2: 0,
}
"""Ops that call a different op -> its place among their arguments."""


def _name(node: Node) -> str:
    place = _PLACE_OF_OP.get(node.target)
    target: Any = node.target if place is None else node.args[place]
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._overloadpacket.__name__}"
    return str(getattr(target, "__name__", target))


# What a rewrite is made of


def _taken_out(nodes: Iterable[Node], edit: Callable[[Node], bool]) -> list[Node]:
    """Those that the edit took out of their graph."""
    return [node for node in list(nodes) if edit(node)]


def _calls(graph: Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _insert(before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with the value that Inductor's passes look at."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    values = map_arg((args, kwargs), lambda one: one.meta["val"])
    modes = [one.fake_mode for one in tree_leaves(values) if hasattr(one, "fake_mode")]
    mode = modes[0] if modes else nullcontext()
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    node.meta["stack_trace"] = before.meta.get("stack_trace")
    return node


def _without(node: Node) -> bool:
    """Put its first argument in its place."""
    return _replace(node, node.args[0])


def _replace(node: Node, other: Any) -> bool:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
    return True


def _shape(node: Node) -> list[int] | None:
    """None where it is not one tensor, or has dynamic sizes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    is_static = all(isinstance(size, int) for size in value.shape)
    return list(value.shape) if is_static else None


# Copies into inputs


def without_copies_into_inputs(graph: Graph) -> list[Node]:
    """What is written into an input at the end is returned instead."""
    return _taken_out(_calls(graph, aten.copy_.default), _without_copy)


def _without_copy(node: Node) -> bool:
    into, value = node.args[:2]
    if not isinstance(into, Node) or into.op != "placeholder":
        return False
    output = node.graph.output_node()
    returned: Any = output.args[0]
    output.args = ((*returned, value),)
    return _replace(node, value)


# Side effects


def without_side_effects(graph: Graph) -> list[Node]:
    """Ops that are run for what they do, a print for instance, and asserts."""
    impure = _taken_out(reversed(graph.nodes), _without_impure)
    return impure + _taken_out(_calls(graph, higher_order.with_effects), _without_effect)


_KEPT = (aten.copy_.default, prims._sink_tokens.default)


def _without_impure(node: Node) -> bool:
    is_call = node.op == "call_function" and node.target not in _KEPT
    is_unused = not node.users
    is_for_its_effect = is_call and is_unused and node.is_impure()
    if is_for_its_effect:
        node.graph.erase_node(node)
    return is_for_its_effect


def _without_effect(node: Node) -> bool:
    """Pass on the token that orders effects; False, and nothing is changed, where the result is used, too."""
    results = [user for user in node.users if user.args[1:] != (0,)]
    if any(user.users for user in results):
        return False
    token = node.args[0]
    for user in list(node.users):
        _replace(user, token)
    node.graph.erase_node(node)
    return True


# Views and layouts


def without_transposes(graph: Graph) -> list[Node]:
    """A transpose becomes a view of the new shape, and a copy for the sake of a layout nothing."""
    taken_out = []
    for node in _calls(graph, aten.permute.default, aten.transpose.int, aten.t.default):
        shape = _shape(node)
        if shape is not None:
            _replace(node, _insert(node, aten.reshape.default, node.args[0], shape))
            taken_out.append(node)
    copies = [node for node in _calls(graph, aten.clone.default) if "memory_format" in node.kwargs]
    return taken_out + _taken_out(copies, _without)


def with_contiguous_transposes(graph: Graph) -> list[Node]:
    """The result of each transpose is copied at once, so that all that follow read it in order."""
    return _taken_out(_calls(graph, aten.permute.default, aten.transpose.int), _copied)


_MATMULS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"})


def _copied(node: Node) -> bool:
    if any(_name(user) in _MATMULS for user in node.users):
        return False
    copy = _insert(node.next, aten.clone.default, node, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return True


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def without_view_chains(graph: Graph) -> list[Node]:
    """A view of a view is one, and a view that changes nothing none."""
    return _taken_out(_calls(graph, *_VIEWS), _joined_view)


def _joined_view(node: Node) -> bool:
    source: Any = node.args[0]
    shape = _shape(node)
    if shape is None:
        return False
    if shape == _shape(source):
        return _replace(node, source)
    is_of_a_view = source.target in _VIEWS and len(source.users) == 1
    return is_of_a_view and _replace(node, _insert(node, aten.reshape.default, source.args[0], shape))


# Casts


def without_casts(graph: Graph) -> list[Node]:
    """Everything stays in the dtype that it has."""
    casts = _calls(graph, aten._to_copy.default, prims.convert_element_type.default)
    return _taken_out([node for node in casts if "device" not in node.kwargs], _without)


# Collectives


def without_collectives(graph: Graph) -> list[Node]:
    """Each rank goes on with what it has, in the shape that the collective gives."""
    for wait in _calls(graph, c10d.wait_tensor.default):
        _without(wait)
    taken_out = []
    for node in list(graph.nodes):
        is_exchange = getattr(node.target, "namespace", "") == "_c10d_functional"
        own = _own_part(node) if is_exchange else None
        if own is not None:
            _replace(node, own)
            taken_out.append(node)
    return taken_out


def _own_part(node: Node) -> Node | None:
    """None for a collective of several tensors or of sizes that are not known."""
    sent = node.args[0]
    if not isinstance(sent, Node):
        return None
    own, shape = _shape(sent), _shape(node)
    if own is None or shape is None:
        return None
    if own == shape:
        return sent
    if own[1:] != shape[1:]:
        return None
    own_rows, rows = own[0], shape[0]
    if own_rows > rows:
        return _insert(node, aten.slice.Tensor, sent, 0, 0, rows)
    ones = [1] * (len(own) - 1)
    return _insert(node, aten.repeat.default, sent, [rows // own_rows, *ones])


# Custom ops


def without_custom_ops(graph: Graph) -> list[Node]:
    """A custom op, or a Triton kernel of the user, becomes an addition of its inputs of that shape."""
    users = [node for node in graph.nodes if node.op == "call_function" and _is_users(node)]
    return _taken_out(users, _with_sums)


_OF_TORCH = frozenset({"aten", "prims", "prim", "inductor", "higher_order", "rngprims", "_c10d_functional", "symm_mem"})
_WRAPPERS = ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")


def _is_users(node: Node) -> bool:
    wrappers = [getattr(higher_order, name, None) for name in _WRAPPERS]
    overload = node.target if isinstance(node.target, OpOverload) else None
    is_custom = overload is not None and overload.namespace not in _OF_TORCH
    return node.target in wrappers or (is_custom and bool(node.users))


def _with_sums(node: Node) -> bool:
    """False, and nothing is changed, where a result has the shape of no input."""
    has_items = isinstance(node.meta.get("val"), tuple | list | dict)
    parts = list(node.users) if has_items else [node]
    if has_items and any(part.target is not operator.getitem for part in parts):
        return False
    operands = {}
    for part in parts:
        shape = _shape(part)
        alike = [one for one in node.all_input_nodes if shape is not None and _shape(one) == shape]
        if part.users and not alike:
            return False
        operands[part] = alike
    for part, inputs in operands.items():
        if part.users:
            total = _insert(node, aten.neg.default, inputs[0])
            for other in inputs[1:]:
                total = _insert(node, aten.add.Tensor, total, other)
            part.replace_all_uses_with(total)
    for part in dict.fromkeys((*parts, node)):
        node.graph.erase_node(part)
    return True
