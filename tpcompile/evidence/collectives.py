"""FX graphs of one compile -> its collectives, in issue order, forward before backward."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from tpcompile.evidence.records import Collective, Graph, Node, UserLine
from tpcompile.evidence.text.lines import is_library, is_library_file

__all__ = ["blamed_line", "collectives_of", "is_library", "is_library_file"]

_TARGET = re.compile(r"^torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem)\.(\w+?)_?(?:\.default)?$")
_INPLACE = re.compile(r"^torch\.distributed\.(?:distributed_c10d\.)?(all_\w+|reduce\w*|broadcast)$")
_REFERENCE = re.compile(r"^%(\d+)$")
_ANY_REFERENCE = re.compile(r"%\d+")
_VALUE = re.compile(r"^(?:DTensor\()?(?P<dtype>[a-z]+\d*\w*)(?P<shape>\[[^\]]*\])")
_NOT_COLLECTIVES = frozenset({"wait_tensor", "wait_tensors"})
_REDUCE_OPS = frozenset({"sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum"})


def collectives_of(graphs: Iterable[Graph]) -> tuple[Collective, ...]:
    """Collectives of the lowered graphs when there are any, else of the Dynamo graph."""
    graphs = list(graphs)
    lowered = [g for g in graphs if g.kind in ("forward", "inference", "backward")]
    chosen = lowered or [g for g in graphs if g.kind == "dynamo"]
    found = [c for graph in chosen for c in _in_graph(graph)]
    return tuple(sorted(found, key=lambda c: c.phase == "backward"))


def _in_graph(graph: Graph) -> list[Collective]:
    by_scope: dict[str, list[Node]] = {}
    for node in graph.nodes:
        by_scope.setdefault(node.scope, []).append(node)
    found = []
    for nodes in by_scope.values():
        waits = {arg: f"%{i}" for i, n in enumerate(nodes) if ".wait_tensor" in n.target for arg in n.args}
        read = {
            ref for n in nodes for arg in (*n.args, *(v for _, v in n.kwargs)) for ref in _ANY_REFERENCE.findall(arg)
        }
        for index, node in enumerate(nodes):
            match = _TARGET.match(node.target) or _INPLACE.match(node.target)
            if node.op == "call" and match and match[1] not in _NOT_COLLECTIVES:
                wait, in_place = waits.get(f"%{index}"), bool(_INPLACE.match(node.target))
                done = {"waited": in_place or wait is not None, "used": in_place or wait is None or wait in read}
                found.append(_collective(graph.kind, match[1], nodes, index).model_copy(update=done))
    return found


def _collective(kind: str, op: str, nodes: list[Node], index: int) -> Collective:
    node = nodes[index]
    operand = _REFERENCE.match(node.args[0]) if node.args else None
    value = _VALUE.match(nodes[int(operand[1])].value if operand else node.value)
    texts = [arg.strip("'\"") for arg in (*node.args, *(v for _, v in node.kwargs))]
    return Collective(
        phase="backward" if kind == "backward" else "forward",
        op=op,
        reduce_op=next((t for t in texts if t in _REDUCE_OPS), ""),
        dtype=value["dtype"] if value else "",
        shape=value["shape"] if value else "",
        group=next((t.removeprefix("group:") for t in texts if t.startswith("group:")), ""),
        line=blamed_line(nodes, index),
    )


def blamed_line(nodes: Sequence[Node], index: int) -> UserLine | None:
    """The user's line for a node.

    Where that is library code and nothing in the log names the caller, the nearest node before it (else after it)
    that came from user code is named instead.
    """
    for at in itertools.chain(range(index, -1, -1), range(index + 1, len(nodes))):
        line = nodes[at].line
        if line is not None and not is_library(line):
            return line
    return nodes[index].line
