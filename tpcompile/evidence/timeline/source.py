"""A line of source -> the names that it reads, and those that it gives a value: `size`; of an attribute, `.scale`."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache

_NOTHING = frozenset[str]()


def read(file: str, line: int) -> frozenset[str]:
    """Names that the statement of a line reads; of an `if` or a loop, those of its first line."""
    return _names(file).get(line, (_NOTHING, _NOTHING))[0]


def assigned(file: str, line: int) -> frozenset[str]:
    """Names that get a value there."""
    return _names(file).get(line, (_NOTHING, _NOTHING))[1]


def loop_around(file: str, line: int) -> tuple[int, int]:
    """First and last line of the innermost loop that contains a line; 0, 0 where it is in none."""
    around = [lines for lines in _loops(file) if line in lines]
    innermost = min(around, key=len, default=None)
    return (innermost[0], innermost[-1]) if innermost is not None else (0, 0)


@lru_cache(maxsize=256)
def _loops(file: str) -> tuple[range, ...]:
    loops = [node for node in ast.walk(_tree(file)) if isinstance(node, ast.For | ast.AsyncFor | ast.While)]
    return tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in loops)


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):  # the finding stands without its names
        return ast.Module([], [])


@lru_cache(maxsize=256)
def _names(file: str) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
    tree = _tree(file)
    found: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
    everywhere = frozenset({*_imported(tree), "self", "cls"})
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        parts = list(_own_parts(node))
        reads = frozenset(name for part in parts for name in _loaded(part)) - everywhere
        writes = frozenset(name for part in parts for name in _stored(part)) - everywhere
        if isinstance(node, ast.For | ast.AsyncFor):  # each pass takes one element, and the last one ends the loop
            passes = {f"{file}:{node.lineno}"}
            reads, writes = reads | passes, writes | passes
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
        for line in range(node.lineno, max(end, node.lineno) + 1):
            before = found.get(line, (_NOTHING, _NOTHING))
            found[line] = before[0] | reads, before[1] | writes
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules: calling their functions changes none of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement without the statements inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from ast.walk(child)


def _loaded(part: ast.AST) -> Iterator[str]:
    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
        yield part.id
    elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
        yield f".{part.attr}"


def _stored(part: ast.AST) -> Iterator[str]:
    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
        yield part.id
    elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
        yield f".{part.attr}"
    elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
        yield from _loaded(part.value)
    elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        yield from _loaded(part.func.value)  # `losses.append(loss)` changes `losses`
