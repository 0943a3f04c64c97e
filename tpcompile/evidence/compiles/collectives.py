"""FX graphs of one compile -> its collectives, in issue order, forward before backward."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Collective, Graph, Node, UserLine
from tpcompile.evidence.records.compile import nodes_of
from tpcompile.evidence.text.group_names import Place
from tpcompile.evidence.text.lines import users

_TARGET = re.compile(r"^torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem)\.(\w+?)_?(?:\.default)?$")
_INPLACE = re.compile(r"^torch\.distributed\.(?:distributed_c10d\.)?(all_\w+|reduce\w*|broadcast)$")
_REFERENCE = re.compile(r"^%(\d+)$")
_ANY_REFERENCE = re.compile(r"%\d+")
_VALUE = re.compile(r"^(?:DTensor\()?([a-z]\w*)(\[[^\]]*\])")
_GROUP = "group:"
_NOT_COLLECTIVES = frozenset({"wait_tensor", "wait_tensors"})
_REDUCE_OPS = frozenset({"sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum"})


def collectives_of(graphs: Iterable[Graph]) -> tuple[Collective, ...]:
    """Collectives of the lowered graphs when there are any, else of the Dynamo graph."""
    graphs = list(graphs)
    lowered = [graph for graph in graphs if graph.kind != "dynamo"]
    in_order = sorted(lowered or graphs, key=lambda graph: graph.phase == "backward")
    found: list[Collective] = []
    for graph in in_order:
        for nodes in graph.scopes:
            found += _Scope(nodes, graph.phase).collectives()
    return tuple(found)


def issued_at(graphs: Iterable[Graph]) -> frozenset[Place]:
    """(file, line, role of the group) of each collective of the graphs."""
    places: list[Place] = []
    for node in nodes_of(graphs):
        line = node.line
        group = find(node.arguments, lambda text: text.startswith(_GROUP))
        if line and group:
            role = group.removeprefix(_GROUP)
            places.append((line.file, line.line, role))
    return frozenset(places)


class _Scope:
    """The nodes of one subgraph, and which of them are waited for and read."""

    def __init__(self, nodes: Sequence[Node], phase: str) -> None:
        self.nodes, self.phase = nodes, phase
        self.waits: dict[str, str] = {}
        """Reference to the result of a collective -> reference to its wait."""
        self.read: set[str] = set()
        for index, node in enumerate(nodes):
            self.read.update(*map(_ANY_REFERENCE.findall, node.arguments))
            if ".wait_tensor" in node.target:
                self.waits |= dict.fromkeys(node.args, f"%{index}")

    def collectives(self) -> Iterator[Collective]:
        for index, node in enumerate(self.nodes):
            match = _TARGET.match(node.target) or _INPLACE.match(node.target)
            if node.op == "call" and match is not None and match[1] not in _NOT_COLLECTIVES:
                yield self.collective(index, match[1])

    def collective(self, index: int, op: str) -> Collective:
        node = self.nodes[index]
        texts = [text.strip("'\"") for text in node.arguments]
        group = find(texts, lambda text: text.startswith(_GROUP)) or ""
        # what is reduced or gathered; the collective itself where its first argument is not a node
        reference = _REFERENCE.match(node.args[0]) if node.args else None
        operand = self.nodes[int(reference[1])] if reference else node
        dtype, shape = next(iter(_VALUE.findall(operand.value)), ("", ""))
        is_broadcast = op == "broadcast" and _TARGET.match(node.target) is not None
        wait = self.waits.get(f"%{index}")
        is_in_place = _INPLACE.match(node.target) is not None
        is_waited = is_in_place or wait is not None
        is_dropped = wait is not None and wait not in self.read
        reduce_op = find(texts, lambda text: text in _REDUCE_OPS)
        return Collective(
            phase=self.phase,
            op=op,
            reduce_op=reduce_op or "",
            src="".join(node.args[1:2]) if is_broadcast else "",
            dtype=dtype,
            shape=shape,
            group=group.removeprefix(_GROUP),
            waited=is_waited,
            used=is_in_place or not is_dropped,
            line=blamed_line(self.nodes, index),
        )


def blamed_line(nodes: Sequence[Node], index: int) -> UserLine | None:
    """The user's line for a node.

    For a node on a line of library code whose caller is not known, the line of the nearest node before it (else after
    it) that is on a user's line.
    """
    for place in itertools.chain(range(index, -1, -1), range(index + 1, len(nodes))):
        line = users(nodes[place].line)
        if line is not None:
            return line
    return nodes[index].line
