"""Nodes of a graph -> text with names of inputs and ops in place of the numbers of nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.iterables import differ, find, indexed
from tpcompile.evidence.records import Item, ItemKind

REFERENCE = re.compile(r"%\d+")
_BODY = re.compile(r"^(self\.\w*?)_\d+$")
"""A subgraph of a higher-order op, numbered in order of appearance."""
_INPUT = re.compile(r"^L_(\w+?)_?$")
_MEMBERS = re.compile(r"_(?:parameters|buffers|modules)_")
_DEPTH = 2
"""Calls that are written inside each other."""


def nodes_in(items: Items) -> Items:
    """The nodes of each group, without graph breaks and errors."""
    return items.only(lambda item: item.kind == ItemKind.NODE)


def is_body(node: Item) -> bool:
    """True for a node that stands for a subgraph."""
    return node.fields["op"] == "get_attr" and _BODY.match(node.fields["target"]) is not None


def unnumbered(target: str) -> str:
    """What a node calls; a subgraph without its number."""
    return _BODY.sub(r"\1", target)


def scope_of(node: Item) -> str:
    """The subgraph that a node is in, empty for the program itself."""
    return node.about.partition("%")[0]


def op_of(node: Item) -> tuple[str, ...]:
    """What a node runs: equal for the same op with the same constants, whatever it reads."""
    fields = node.fields
    return fields.get("op", ""), fields.get("target", ""), node.notes.get("constants", "")


def read_instead(items: Items, row: Row) -> str:
    """The first value that the nodes of a row read and in which they differ: `relu(x) / tanh(x)`; empty for none."""
    read_by: list[list[str]] = []
    for nodes, item in zip(items, row, strict=True):
        by_name = indexed(nodes, lambda node: node.about)
        names = item.notes["reads"].split() if item else []
        values = [name for name in names if name in by_name and not is_body(by_name[name])]
        read_by.append([_written(by_name, name, _DEPTH) for name in values])
    different = find(zip(*read_by, strict=False), differ)
    return " / ".join(different) if different else ""


def called(item: Item) -> str:
    """The op of a node by its own name: `all_reduce` of `torch.ops._c10d_functional.all_reduce.default`."""
    if item.fields["target"].endswith(".autograd_function_apply"):
        return "autograd function"
    return item.fields["target"].removesuffix(".default").rpartition(".")[2].removeprefix("method ")


def _written(by_name: Mapping[str, Item], name: str, depth: int) -> str:
    """A node as the user would write it, with that many calls inside each other."""
    node = by_name.get(name)
    if node is None:
        return name
    scope = scope_of(node)

    def inside(reference: re.Match[str]) -> str:
        return _written(by_name, scope + reference[0], depth - 1)

    target, args = node.fields["target"], node.fields["args"]
    if node.fields["op"] == "placeholder":
        # `L_self_modules_head_parameters_weight_` is `self.head.weight`
        match = _INPUT.match(target)
        return _MEMBERS.sub(".", match[1]) if match else target
    if node.fields["op"] == "get_attr":
        return REFERENCE.sub(inside, target)
    name = called(node)
    shown = ".."
    if depth > 0:
        shown = REFERENCE.sub(inside, args)
    return f"{name}({shown})"
