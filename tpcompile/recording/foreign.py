"""Compiled graphs -> the custom ops and user Triton kernels in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tpcompile.evidence.compiles.collectives import blamed_line
from tpcompile.evidence.records import CompileRecord, Graph, Item, Node, UserLine, value_item
from tpcompile.fastpath.use import TORCH_NAMESPACES

NAMELESS = "triton kernel"
"""A launch of which only its number in a table of the process is known."""

_OP = re.compile(r"^torch\.ops\.(\w+)\.(\w+)")


def foreign_ops(compiles: Iterable[CompileRecord]) -> tuple[Item, ...]:
    """Each custom op and user Triton kernel once per line: `namespace::op` or `module.kernel`, with the user's line."""
    found: dict[tuple[str, UserLine | None], Item] = {}
    for compile_ in compiles:
        for graph in compile_.graphs:
            for item in _foreign_items(graph):
                found.setdefault((item.about, item.line), item)
    return tuple(sorted(found.values(), key=lambda item: item.about))


def _foreign_items(graph: Graph) -> Iterator[Item]:
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        name = foreign_name(node)
        if name == NAMELESS and graph.kind != "dynamo":
            continue  # text of a cache; the call that launches it is in the Dynamo graph
        if name:
            item = value_item(name, f"in the {graph.kind} graph", line=blamed_line(nodes, index))
            yield item.model_copy(update={"notes": {"graph": graph.kind}})


def foreign_name(node: Node) -> str:
    """Name of a custom op or user Triton kernel, empty for torch's own nodes."""
    match = _OP.match(node.target)
    if node.op != "call" or match is None:
        return ""
    if node.is_launch:
        return dict(node.kwargs).get("kernel", NAMELESS).strip("'")
    namespace, op = match.groups()
    if namespace in TORCH_NAMESPACES:
        return ""
    return f"{namespace}::{op}"
