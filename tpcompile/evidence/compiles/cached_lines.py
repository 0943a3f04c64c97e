"""Lowered graphs from a compile cache -> the same with the current lines of the source.

torch keeps the text of such a graph in the cache of AOTAutograd, with the lines of the program that filled it: a file
that was edited since, or a copy of it. The Dynamo graph is traced in every process, and its lines are current.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.compiles.user_lines import is_there
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Graph, Node, UserLine
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.records.compile import nodes_of
from tpcompile.evidence.text.lines import is_library

FROM_CACHE = "aotautograd_cache_hit"
"""The trace event of a compile whose lowered graphs come from that cache."""
_Code = tuple[str, str]
"""The function and the text of a line, without a comment: equal when lines above it are added or removed."""


def with_current_lines(dynamo: Sequence[Graph], lowered: Sequence[Graph]) -> list[Graph]:
    """All graphs; the lowered ones have the lines that the Dynamo graphs, with the user's, have for the same code.

    Of equal lines of one function, the n-th becomes the n-th. A user's line whose code neither a Dynamo graph nor the
    source has is dropped: no line is better than a wrong one.
    """
    moved = _moved(_users_lines(lowered), _users_lines(dynamo))
    return [*dynamo, *(_with(graph, moved) for graph in lowered)]


def _users_lines(graphs: Sequence[Graph]) -> list[UserLine]:
    return [line for line in lines_of(nodes_of(graphs)) if not is_library(line)]


def _moved(cached: Iterable[UserLine], now: Iterable[UserLine]) -> dict[UserLine, UserLine | None]:
    """Line in the cache -> the current line, None where it is not known; those that have not moved are left out."""
    by_code = _in_order(now)
    moved: dict[UserLine, UserLine | None] = {}
    for code, lines in _in_order(cached).items():
        found = by_code.get(code, [])
        is_same = set(lines) <= set(found)
        is_moved = len(found) == len(lines)
        if is_moved and not is_same:
            moved |= zip(lines, found, strict=True)
        elif not is_same:
            moved |= {line: line if is_there(line) else None for line in lines}
    return moved


def _in_order(lines: Iterable[UserLine]) -> dict[_Code, list[UserLine]]:
    ordered = sorted(set(lines), key=lambda line: (line.file, line.line))
    return grouped(ordered, _code)


def _code(line: UserLine) -> _Code:
    return line.function, line.code.partition("  #")[0].strip()


def _with(graph: Graph, moved: Mapping[UserLine, UserLine | None]) -> Graph:
    return graph.model_copy(update={"nodes": tuple(_of_now(node, moved) for node in graph.nodes)})


def _of_now(node: Node, moved: Mapping[UserLine, UserLine | None]) -> Node:
    if node.line is None or node.line not in moved:
        return node
    return node.model_copy(update={"line": moved[node.line]})
