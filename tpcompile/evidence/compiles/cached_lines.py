"""Lowered graphs, and stacks of generated code, from a compile cache -> the same with the current lines of the source.

torch keeps the text of such a graph in the cache of AOTAutograd, and the stacks of generated code in that of Inductor,
with the lines of the program that filled it: a file that was edited since, or a different program with the same graph.
The Dynamo graph is traced in every process, and its lines are current.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.compiles.user_lines import is_there
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Graph, Node, UserLine
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.records.compile import nodes_of
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import is_library, own_lines

FROM_CACHE = "aotautograd_cache_hit"
"""The trace event of a compile whose lowered graphs come from that cache."""
CODE_FROM_CACHE = frozenset({FROM_CACHE, "fx_graph_cache_hit"})
"""The trace events of a compile whose generated code comes from a cache."""
_Code = tuple[str, str]
"""The function and the text of a line, without a comment: equal when lines above it are added or removed."""


def with_current_lines(dynamo: Sequence[Graph], lowered: Sequence[Graph]) -> list[Graph]:
    """All graphs; the lowered ones have the lines that the Dynamo graphs, with the user's, have for the same code.

    Of equal lines of one function, the n-th becomes the n-th. A user's line whose code neither a Dynamo graph nor the
    source of its files has is dropped: no line is better than a wrong one.
    """
    now = _users_lines(dynamo)
    files = {line.file for line in itertools.chain.from_iterable(now.values())}
    moved: dict[UserLine, UserLine | None] = {}
    for code, lines in _users_lines(lowered).items():
        found = now.get(code, [])
        if set(lines) <= set(found):
            continue
        if len(found) == len(lines):
            moved |= zip(lines, found, strict=True)
            continue
        for line in lines:
            is_current = line.file in files and is_there(line)
            moved[line] = line if is_current else None
    return [*dynamo, *(_with(graph, moved) for graph in lowered)]


def _users_lines(graphs: Sequence[Graph]) -> dict[_Code, list[UserLine]]:
    """The user's lines in graphs by their code; equal code in the order of its places."""
    lines = {line for line in lines_of(nodes_of(graphs)) if not is_library(line)}
    ordered = sorted(lines, key=lambda line: (line.file, line.line))
    return grouped(ordered, _code)


def _with(graph: Graph, moved: Mapping[UserLine, UserLine | None]) -> Graph:
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.line is not None and node.line in moved:
            node = node.changed(line=moved[node.line])
        nodes.append(node)
    return graph.changed(nodes=tuple(nodes))


def with_current_stacks(cached: Sequence[str], traced: Iterable[str]) -> list[str]:
    """Stacks of generated code, as torch prints them; each becomes the traced one with the same code, or empty."""
    now = _stacks_in_order(traced)
    current: dict[str, str] = {}
    for code, stacks in _stacks_in_order(cached).items():
        found = now.get(code, [])
        if set(stacks) <= set(found):
            current |= zip(stacks, stacks, strict=True)
        elif len(found) == len(stacks):
            current |= zip(stacks, found, strict=True)
    return [current.get(stack, "") for stack in cached]


def _stacks_in_order(stacks: Iterable[str]) -> dict[tuple[_Code, ...], list[str]]:
    """Stacks with a user's line, by the code of these lines; equal code in the order of its places."""
    own = {stack: own_lines(stack_lines(stack)) for stack in dict.fromkeys(stacks)}
    with_own = [stack for stack, lines in own.items() if lines]
    ordered = sorted(with_own, key=lambda stack: [(line.file, line.line) for line in own[stack]])
    return grouped(ordered, lambda stack: tuple(map(_code, own[stack])))


def _code(line: UserLine) -> _Code:
    return line.function, line.code.partition("  #")[0].strip()
