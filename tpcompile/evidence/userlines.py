"""Graphs whose nodes name the library's frame -> the same with the user's line that called it.

Torch prints the innermost frame of a node only. For a collective that is a line of torch or of our wrappers; the
user's call stands between the nodes before and after it. Guards name lines of the same function, and so does the
source file, where it is at hand and still the one that was traced.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.collectives import is_library
from tpcompile.evidence.records import Graph, Guard, Node, UserLine

_MAX_LINES = 60
"""Lines of source searched on each side of the user's line."""


def with_user_lines(graphs: Sequence[Graph], guards: Iterable[Guard]) -> tuple[Graph, ...]:
    """Replace the lines of library code, where the caller can be told."""
    of_nodes = {node.line for graph in graphs for node in graph.nodes}
    lines = {line for line in of_nodes.union(guard.line for guard in guards) if line is not None}
    known = {line for line in lines if not is_library(line)}
    if known == lines:
        return tuple(graphs)
    return tuple(_Lines(graph, known).replaced() for graph in graphs)


class _Lines:
    """The nodes of one graph, in order, and the user's line reached so far."""

    def __init__(self, graph: Graph, known: set[UserLine]) -> None:
        self.graph, self.known = graph, known
        self.before: UserLine | None = None
        self.called: list[UserLine] = []
        """Calls found since the last line of the user, in order."""

    def replaced(self) -> Graph:
        nodes = [self.node(node) for node in self.graph.nodes]
        return self.graph.model_copy(update={"nodes": tuple(nodes)})

    def node(self, node: Node) -> Node:
        if node.line is None:
            return node
        if not is_library(node.line):
            self.before, self.called = node.line, []
            return node
        line = self.caller(node)
        return node if line is None else node.model_copy(update={"line": line})

    def caller(self, node: Node) -> UserLine | None:
        """The user's call of the function that a library line stands in."""
        if self.before is None or node.line is None:
            return None
        names = {node.line.function, _op(node)} - {""}
        if "wait_tensor" not in names:
            found = self.next_call(self.candidates(names), self.called[-1] if self.called else self.before)
            if found is not None:
                self.called.append(found)
        return self.called[-1] if self.called else None

    def next_call(self, candidates: Sequence[UserLine], after: UserLine) -> UserLine | None:
        """The next call in the direction in which the graph goes through the source, or the only one."""
        lines = {line.line: line for line in candidates}
        if len(lines) == 1:
            return next(iter(lines.values()))
        is_backward = self.graph.kind == "backward"
        return _next(lines, after.line, is_backward=is_backward, with_start=not self.called)

    def candidates(self, names: set[str]) -> list[UserLine]:
        """Lines of the function at hand that call one of these."""
        assert self.before is not None, "asked only behind a line of the user"
        near = [line for line in self.known if _same_function(line, self.before)]
        return [line for line in [*near, *_source_around(self.before)] if _calls(line, names)]


def _next(lines: Mapping[int, UserLine], start: int, *, is_backward: bool, with_start: bool) -> UserLine | None:
    """The nearest line on one side of a start, which counts unless it is taken."""
    if with_start and start in lines:
        return lines[start]
    if is_backward:
        ahead = [number for number in sorted(lines, reverse=True) if number < start]
    else:
        ahead = [number for number in sorted(lines) if number > start]
    return lines[ahead[0]] if ahead else None


def _op(node: Node) -> str:
    """`all_reduce` of `torch.ops._c10d_functional.all_reduce.default`."""
    parts = node.target.removeprefix("torch.ops.").split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else ""


def _same_function(line: UserLine, other: UserLine) -> bool:
    same_file = line.file.endswith(other.file) or other.file.endswith(line.file)
    return same_file and line.function == other.function


def _calls(line: UserLine, names: set[str]) -> bool:
    return any(f"{name}(" in line.code for name in names)


def _source_around(line: UserLine) -> list[UserLine]:
    """The lines of its function, as the file has them; none when it is another file now."""
    source = linecache.getlines(line.file)
    if not _is_there(line, source):
        return []
    first, last = max(1, line.line - _MAX_LINES), min(len(source), line.line + _MAX_LINES)
    definitions = [number for number in range(first, last + 1) if _is_definition(source[number - 1])]
    start = max([first, *(number for number in definitions if number <= line.line)])
    end = min([last, *(number - 1 for number in definitions if number > line.line)])
    numbers = range(start, end + 1)
    return [line.model_copy(update={"line": number, "code": source[number - 1].strip()}) for number in numbers]


def _is_there(line: UserLine, source: Sequence[str]) -> bool:
    """True when the file still has that code on that line."""
    is_inside = 0 < line.line <= len(source)
    return is_inside and bool(line.code) and line.code in source[line.line - 1]


def _is_definition(code: str) -> bool:
    return code.lstrip().startswith(("def ", "async def ", "class ", "@"))
