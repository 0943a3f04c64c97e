"""Graphs whose nodes name the library's frame -> the same with the user's line that called it.

Torch prints only the innermost frame of a node. For a collective that is a line of torch or of our wrappers; the
user's call is between the lines of the nodes before and after it. Candidates are the lines of the same function that
guards name, and those of the source file where it is readable and unchanged since it was traced.
"""

from __future__ import annotations

import bisect
import linecache
import os
from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.iterables import first, last
from tpcompile.evidence.records import Graph, Guard, Node, UserLine
from tpcompile.evidence.records.base import known, lines_of
from tpcompile.evidence.records.compile import nodes_of
from tpcompile.evidence.text.lines import is_library, own_lines

_MAX_LINES = 60
"""Lines of source searched on each side of the user's line."""
_MAX_SOURCE_BYTES = 16 << 20
"""Largest file that is read as source."""
_DEFINES = ("def ", "async def ", "class ", "@")


def with_user_lines(graphs: Sequence[Graph], guards: Iterable[Guard]) -> tuple[Graph, ...]:
    """Replace lines of library code by the user's calling line, where that can be determined."""
    lines = set(lines_of([*nodes_of(graphs), *guards]))
    own = set(own_lines(lines))
    if own == lines:
        return tuple(graphs)
    replaced: list[Graph] = []
    for graph in graphs:
        nodes = map(_Lines(graph, own).node, graph.nodes)
        replaced.append(graph.changed(nodes=tuple(nodes)))
    return tuple(replaced)


class _Lines:
    """The nodes of one graph, in order, and the last user's line seen so far."""

    def __init__(self, graph: Graph, known: set[UserLine]) -> None:
        self.graph, self.known = graph, known
        self.before: UserLine | None = None
        self.called: list[UserLine] = []
        """Calls found since the last user's line, in order."""

    def node(self, node: Node) -> Node:
        """The node; one on a line of library code gets the user's line that called it."""
        if node.line is None:
            return node
        if not is_library(node.line):
            self.before, self.called = node.line, []
            return node
        if self.before is None:
            return node
        line = self.caller(node, node.line, self.before)
        return node.changed(line=line or node.line)

    def caller(self, node: Node, line: UserLine, before: UserLine) -> UserLine | None:
        """The user's line that calls the function of a library line."""
        # `all_reduce` of `torch.ops._c10d_functional.all_reduce.default`
        _, *op = node.target.removeprefix("torch.ops.").split(".")
        names = {line.function, *(part.rstrip("_") for part in op[:1])} - {""}
        if "wait_tensor" not in names:
            found = self.next_call(self.calls_around(before, names), last(self.called) or before)
            self.called += known([found])
        return last(self.called)

    def calls_around(self, before: UserLine, names: set[str]) -> dict[int, UserLine]:
        """Lines in the function around `before` that call any of these names, by line number."""
        calls = [f"{name}(" for name in names]
        found: dict[int, UserLine] = {}
        for line in [*self.known, *_source_around(before)]:
            # of one of two paths only the end may be known
            is_same_file = line.file.endswith(before.file) or before.file.endswith(line.file)
            is_near = is_same_file and line.function == before.function
            if is_near and any(call in line.code for call in calls):
                found[line.line] = line
        return found

    def next_call(self, candidates: Mapping[int, UserLine], after: UserLine) -> UserLine | None:
        """The next call in source order, in reverse order for a backward graph; with one candidate, that one."""
        if len(candidates) == 1:
            return first(candidates.values())
        is_backward = self.graph.kind == "backward"
        return _next(candidates, after.line, is_backward=is_backward, with_start=not self.called)


def _next(lines: Mapping[int, UserLine], start: int, *, is_backward: bool, with_start: bool) -> UserLine | None:
    """The nearest line after the start, or before it in a backward graph; the start itself counts `with_start`."""
    in_order = sorted({*lines, start}, reverse=is_backward)
    skipped = in_order.index(start) + (not with_start)
    left = in_order[skipped:]
    return first(lines[number] for number in left if number in lines)


def _source_around(line: UserLine) -> list[UserLine]:
    """The lines of its function in the source file; none when the file has changed."""
    source = _source(line.file)
    if not is_there(line):
        return []
    start = max(1, line.line - _MAX_LINES)
    end = min(len(source), line.line + _MAX_LINES)
    definitions = [number for number in range(start, end + 1) if source[number - 1].lstrip().startswith(_DEFINES)]
    bounds = [start, *definitions, end + 1]
    at = bisect.bisect_right(definitions, line.line)
    numbers = range(bounds[at], bounds[at + 1])
    return [line.changed(line=number, code=source[number - 1].strip()) for number in numbers]


def is_there(line: UserLine) -> bool:
    """True when the source file still has that code on that line."""
    here = _source(line.file)[max(0, line.line - 1) : line.line]
    return bool(line.code) and any(line.code in text for text in here)


def _source(file: str) -> list[str]:
    """Lines of a source file; none of what a log may name instead: a device without an end, a file of any size."""
    is_read = file in linecache.cache
    is_source = is_read or (os.path.isfile(file) and os.path.getsize(file) <= _MAX_SOURCE_BYTES)
    return linecache.getlines(file) if is_source else []
