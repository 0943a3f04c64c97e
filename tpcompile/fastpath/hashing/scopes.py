"""Function, class or comprehension -> the names that it binds itself, and those that it imports."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

CHANGES = frozenset({
    "append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard",
    "appendleft", "popleft", "extendleft", "subtract", "difference_update", "intersection_update", "sort", "reverse",
    "set", "reset",
})  # fmt: skip
"""Methods that change what they are called on."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BINDS: dict[type[ast.AST], str] = {
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
    ast.arg: "arg",
}
"""Nodes that bind a name -> the field that has it."""


@dataclass
class Scope:
    """Names of one scope."""

    is_class: bool = False
    """Functions inside of it do not see its names."""
    local: set[str] = field(default_factory=set)
    imports: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Name -> module, attribute of it (empty for the module itself), and level of a relative import."""
    once: dict[str, ast.expr] = field(default_factory=dict)
    """Local variable that is bound once -> expression."""
    globals: set[str] = field(default_factory=set)
    """Names that are declared global."""


@functools.cache  # many fast paths share their helpers
def scope_of(node: ast.AST) -> Scope:
    """The scope that a node opens; not to be changed."""
    scope = Scope(is_class=isinstance(node, ast.ClassDef))
    bound: Counter[str | None] = Counter()
    elsewhere: set[str | None] = {None}
    expressions = {}
    for inner in _inside(node):
        match inner:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound[name] += 1
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                expressions[name] = value
            case ast.Global(names=names):
                scope.globals.update(names)
                elsewhere.update(names)
            case ast.Nonlocal(names=names):
                elsewhere.update(names)
            case ast.Import() | ast.ImportFrom():
                scope.imports |= imports_of(inner)
            case _:
                name = _BINDS.get(type(inner), "")
                bound[getattr(inner, name, None)] += 1
    scope.local = {name for name in bound if name not in elsewhere}  # type: ignore[misc]  # without None
    scope.once = {name: each for name, each in expressions.items() if name in scope.local and bound[name] == 1}
    return scope


def imports_of(node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str, int]]:
    """What an import binds, as in `Scope.imports`."""
    found = {}
    for alias in node.names:
        top = alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom):
            found[alias.asname or alias.name] = node.module or "", alias.name, node.level
        elif alias.asname:
            found[alias.asname] = alias.name, "", 0
        else:
            found[top] = top, "", 0
    return found


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a scope, without those of the scopes inside of it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, _COMPREHENSIONS):
            named = [inner for inner in ast.walk(child) if isinstance(inner, ast.NamedExpr)]
            targets = [inner.target for inner in named]
            yield from targets  # they bind in the scope around it
        elif not isinstance(child, _SCOPES):
            yield from _inside(child)
