"""Function, class or comprehension -> the names that it binds itself, and those that it imports."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Scope:
    """Names of one scope."""

    is_class: bool = False
    """Functions inside of it do not see its names."""
    local: set[str] = field(default_factory=set)
    imports: dict[str, tuple[str, str | None, int]] = field(default_factory=dict)
    """Name -> module, attribute of it (None for the module itself), and level of a relative import."""
    once: dict[str, ast.expr] = field(default_factory=dict)
    """Local variable that is assigned once -> expression."""
    assigned_outside: set[str] = field(default_factory=set)
    """Names that are declared global or nonlocal."""
    globals: set[str] = field(default_factory=set)
    """Those of them that are declared global."""


@functools.cache  # many fast paths share their helpers
def scope_of(node: ast.AST) -> Scope:
    """The scope that a node opens; not to be changed."""
    scope = Scope(is_class=isinstance(node, ast.ClassDef))
    assigned: Counter[str] = Counter()
    for inner in _inside(node):
        _bind(inner, scope)
        match inner:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                assigned[name] += 1
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                scope.once[name] = value
    scope.local -= scope.assigned_outside
    for name in list(scope.once):
        if assigned[name] > 1 or name not in scope.local:
            del scope.once[name]
    return scope


def _bind(node: ast.AST, scope: Scope) -> None:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            scope.local.add(name)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            scope.local.add(name)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            scope.local.add(name)
        case ast.MatchMapping(rest=str(name)):
            scope.local.add(name)
        case ast.Global(names=names):
            scope.globals.update(names)
            scope.assigned_outside.update(names)
        case ast.Nonlocal(names=names):
            scope.assigned_outside.update(names)
        case ast.Import(names=aliases):
            for alias in aliases:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                scope.imports[alias.asname or module] = module, None, 0
        case ast.ImportFrom(module=module, names=aliases, level=level):
            for alias in aliases:
                scope.imports[alias.asname or alias.name] = module or "", alias.name, level


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a scope, without those of the scopes inside of it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, _COMPREHENSIONS):
            named = filter(lambda inner: isinstance(inner, ast.NamedExpr), ast.walk(child))
            yield from (inner.target for inner in named)  # type: ignore[attr-defined]  # they bind in the scope around it
        elif not isinstance(child, _SCOPES):
            yield from _inside(child)
