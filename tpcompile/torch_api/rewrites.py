"""Graphs that Inductor gets -> the same with one kind of op taken out, to see what it costs; the results are wrong.

    name                                    why
    config.post_grad_custom_pre_pass        the graph, functional, before Inductor's own passes
    higher_order.auto_functionalized(_v2)   custom ops in place
    higher_order.with_effects, prims._sink_tokens    ops that are run for what they do
    higher_order.triton_kernel_wrapper_functional    the user's Triton kernels
    aten._to_copy, prims.convert_element_type        casts

Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_rewrites.py` fails when one of the names moves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tpcompile.torch_api.scheduled import users_lines

aten, prims, c10d, higher_order = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional, torch.ops.higher_order
Rewrite = Callable[[Graph], list[Node]]
"""Changes a graph, and returns the nodes that it took out."""


class RewritingPass(CustomGraphPass):
    """A custom pass that applies a rewrite to each graph, and keeps what was taken out as plain fields."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self.found: list[dict[str, Any]] = []

    def __call__(self, graph: Graph) -> None:
        """Edit the graph in place."""
        for node in self._rewrite(graph):
            self.found.append({"op": _name(node), "lines": users_lines([node])})

    def uuid(self) -> None:
        """No code of a rewritten graph is cached."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RewritingPass:
        """Of the copies that torch.compile makes of its settings, all report to the same list."""
        return self


def _name(node: Node) -> str:
    target = node.target
    if target is higher_order.with_effects:
        target = node.args[1]
    if target in (higher_order.auto_functionalized, getattr(higher_order, "auto_functionalized_v2", None)):
        target = node.args[0]
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._overloadpacket.__name__}"
    return str(getattr(target, "__name__", target))


# What a rewrite is made of


def _calls(graph: Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _insert(graph: Graph, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with the value that Inductor's passes look at."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    values = map_arg((args, kwargs), lambda one: one.meta["val"])
    mode = next((one.fake_mode for one in _tensors(values)), nullcontext())
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    node.meta["stack_trace"] = before.meta.get("stack_trace")
    return node


def _tensors(values: Any) -> Iterator[Any]:
    if hasattr(values, "fake_mode"):
        yield values
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _tensors(one)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _replace(node: Node, other: Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _shape(node: Node) -> list[int] | None:
    """None where it is not one tensor, or has dynamic sizes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes = list(value.shape)
    return sizes if all(isinstance(size, int) for size in sizes) else None


# Rewrites


def without_copies_into_inputs(graph: Graph) -> list[Node]:
    """What is written into an input at the end is returned instead."""
    found = []
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in _calls(graph, aten.copy_.default):
        into, value = node.args[:2]
        if into.op == "placeholder":
            node.replace_all_uses_with(value)
            output.args = ((*output.args[0], value),)
            graph.erase_node(node)
            found.append(node)
    return found


def without_side_effects(graph: Graph) -> list[Node]:
    """Ops that are run for what they do, a print for instance, and asserts."""
    found = []
    for node in reversed(list(graph.nodes)):
        is_call = node.op == "call_function" and node.target not in _KEPT
        if is_call and not node.users and node.is_impure():
            graph.erase_node(node)
            found.append(node)
    for node in _calls(graph, higher_order.with_effects):
        if _without_effect(node):
            found.append(node)
    return found


_KEPT = (aten.copy_.default, prims._sink_tokens.default)


def _without_effect(node: Node) -> bool:
    """Pass on the token that orders effects; False, and nothing is changed, where the result is used, too."""
    tokens = [user for user in node.users if user.args[1:] == (0,)]
    others = [user for user in node.users if user not in tokens and user.users]
    if others:
        return False
    for user in list(node.users):
        user.replace_all_uses_with(node.args[0])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


def without_transposes(graph: Graph) -> list[Node]:
    """A transpose becomes a view of the new shape, and a copy for the sake of a layout nothing."""
    found = []
    for node in _calls(graph, aten.permute.default, aten.transpose.int, aten.t.default):
        shape = _shape(node)
        if shape is not None:
            _replace(node, _insert(graph, node, aten.reshape.default, node.args[0], shape))
            found.append(node)
    for node in _calls(graph, aten.clone.default):
        if "memory_format" in node.kwargs:
            _replace(node, node.args[0])
            found.append(node)
    return found


def with_contiguous_transposes(graph: Graph) -> list[Node]:
    """The result of each transpose is copied at once, so that all that follow read it in order."""
    found = []
    for node in _calls(graph, aten.permute.default, aten.transpose.int):
        if not any(_name(user) in _MATMULS for user in node.users):
            copy = _insert(graph, node.next, aten.clone.default, node, memory_format=torch.contiguous_format)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            found.append(node)
    return found


_MATMULS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"})


def without_view_chains(graph: Graph) -> list[Node]:
    """A view of a view is one, and a view that changes nothing none."""
    found = []
    views = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
    for node in _calls(graph, *views):
        source, shape = node.args[0], _shape(node)
        if shape is None:
            continue
        if shape == _shape(source):
            _replace(node, source)
            found.append(node)
        elif source.target in views and len(source.users) == 1:
            _replace(node, _insert(graph, node, aten.reshape.default, source.args[0], shape))
            found.append(node)
    return found


def without_casts(graph: Graph) -> list[Node]:
    """Everything stays in the dtype that it has."""
    found = []
    for node in _calls(graph, aten._to_copy.default, prims.convert_element_type.default):
        if "device" not in node.kwargs:
            _replace(node, node.args[0])
            found.append(node)
    return found


def without_collectives(graph: Graph) -> list[Node]:
    """Each rank goes on with what it has, in the shape that the collective gives."""
    found = []
    for node in _calls(graph, c10d.wait_tensor.default):
        _replace(node, node.args[0])
    for node in list(graph.nodes):
        is_exchange = node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional"
        own = _own_part(graph, node) if is_exchange else None
        if own is not None:
            _replace(node, own)
            found.append(node)
    return found


def _own_part(graph: Graph, node: Node) -> Node | None:
    """None for a collective of several tensors or of sizes that are not known."""
    sent, shape = node.args[0], _shape(node)
    if not isinstance(sent, Node) or shape is None:
        return None
    own = _shape(sent)
    if own is None or own[1:] != shape[1:]:
        return None
    if own[:1] == shape[:1]:
        return sent
    if own[0] > shape[0]:
        return _insert(graph, node, aten.slice.Tensor, sent, 0, 0, shape[0])
    return _insert(graph, node, aten.repeat.default, sent, [shape[0] // own[0], *[1] * (len(own) - 1)])


def without_custom_ops(graph: Graph) -> list[Node]:
    """A custom op, or a Triton kernel of the user, becomes an addition of its inputs of that shape."""
    found = []
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_users(node) and _with_sums(graph, node):
            found.append(node)
    return found


_OF_TORCH = frozenset({"aten", "prims", "prim", "inductor", "higher_order", "rngprims", "_c10d_functional", "symm_mem"})
_WRAPPERS = ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")


def _is_users(node: Node) -> bool:
    is_wrapped = node.target in [getattr(higher_order, name, None) for name in _WRAPPERS]
    overload = node.target if isinstance(node.target, torch._ops.OpOverload) else None
    is_custom = overload is not None and overload.namespace not in _OF_TORCH and bool(node.users)
    return is_wrapped or is_custom


def _with_sums(graph: Graph, node: Node) -> bool:
    """False, and nothing is changed, where a result has the shape of no input."""
    parts = list(node.users) if isinstance(node.meta.get("val"), tuple | list | dict) else [node]
    inputs = [one for one in node.all_input_nodes if _shape(one) is not None]
    alike = {part: [one for one in inputs if _shape(one) == _shape(part)] for part in parts if part.users}
    is_simple = all(part is node or part.target is operator.getitem for part in parts)
    if not is_simple or not all(alike.values()):
        return False
    for part, operands in alike.items():
        part.replace_all_uses_with(_sum(graph, node, operands))
    for part in parts:
        if part is not node:
            graph.erase_node(part)
    graph.erase_node(node)
    return True


def _sum(graph: Graph, before: Node, operands: Iterable[Node]) -> Node:
    first, *others = operands
    total = _insert(graph, before, aten.neg.default, first)
    for other in others:
        total = _insert(graph, before, aten.add.Tensor, total, other)
    return total
