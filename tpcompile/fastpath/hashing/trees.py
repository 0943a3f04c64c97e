"""Python source -> syntax trees: where a function, class or global variable is written, its text, its own names.

The text is made of the fields of the tree, not of bytecode or `ast.unparse`, which differ between versions of Python.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from tpcompile.errors import ConfigError

CHANGES = frozenset({
    "append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard",
    "appendleft", "popleft", "extendleft", "subtract", "difference_update", "intersection_update", "sort", "reverse",
    "set", "reset",
})  # fmt: skip
"""Methods that change what they are called on."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_OpensScope = Function | ast.ClassDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_NAMED = (*_Definition.__args__, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_BINDS = {ast.MatchMapping: "rest", ast.arg: "arg"} | dict.fromkeys(_NAMED, "name")
"""Nodes that bind a name -> the field that has it."""
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment"})


@dataclass
class File:
    """The syntax tree of one file."""

    text: str
    tree: ast.Module

    @cached_property
    def functions(self) -> dict[int, list[Function]]:
        """First line, that of a decorator if there is one -> functions that begin there."""
        found: dict[int, list[Function]] = defaultdict(list)
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                decorators = getattr(node, "decorator_list", [])
                found[min(part.lineno for part in (node, *decorators))].append(node)
        return found

    @cached_property
    def statements(self) -> dict[str, list[ast.stmt]]:
        """Global variable -> statements of the module that bind it, or change it: stores, calls of it and with it."""
        found: dict[str, list[ast.stmt]] = defaultdict(list)
        for statement in self.tree.body:
            for name in set(_changed_by(statement)):
                found[name].append(statement)
        return found

    def classes(self, qualname: str) -> list[ast.ClassDef]:
        """Definitions of a class; several where one is defined in different branches."""
        around: list[Any] = [self.tree]
        for name in qualname.replace(".<locals>", "").split("."):
            found = []
            for node in chain.from_iterable(map(nodes_of, around)):
                if isinstance(node, _Definition) and node.name == name:
                    found.append(node)
            around = found
        return [node for node in around if isinstance(node, ast.ClassDef)]


_FILES: dict[str, File] = {}


def file_of(name: str, module: Mapping[str, Any] | None = None) -> File:
    """A file of Python source, empty when it cannot be found or read. `module` are the globals of its module."""
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name, dict(module) if module else None))
    known = _FILES.get(name)
    if known is None or known.text != text:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            tree = ast.Module([], [])
        known = _FILES[name] = File(text, tree)
    return known


def body_of(kind: type) -> list[ast.ClassDef]:
    """The definitions of a class; none for one that was made by a call."""
    return file_of(str(getattr(sys.modules.get(kind.__module__), "__file__", ""))).classes(kind.__qualname__)


def definition_of(function: FunctionType) -> Function:
    """The definition of a function; ConfigError when it is in no file."""
    code = function.__code__
    begin_there = file_of(code.co_filename, function.__globals__).functions.get(code.co_firstlineno, [])
    found = [node for node in begin_there if getattr(node, "name", "<lambda>") == code.co_name]
    if len(found) > 1:
        holding = [node for node in found if _holds(node, code)]
        found = sorted(holding, key=lambda node: (node.lineno, node.col_offset))  # the last one is inside of the others
    if not found:
        raise ConfigError(
            f"Python finds no source of {function.__module__}.{function.__name__}, so changes of it could not be "
            "detected; define it in a file"
        )
    return found[-1]


def _holds(node: Any, code: CodeType) -> bool:
    """True when all instructions of the code lie inside of a function."""
    inside = node.body if isinstance(node, ast.Lambda) else node
    begin, end = (inside.lineno, inside.col_offset), (inside.end_lineno, inside.end_col_offset)
    begins, ends = [begin], [end]
    for place in code.co_positions():
        if all(place):  # Python adds instructions without a place
            line, end_line, column, end_column = place
            begins.append((line, column))
            ends.append((end_line, end_column))
    return min(begins) >= begin and max(ends) <= end


def text_of(node: Any) -> str:
    """Fields of a tree as text, without comments, layout and places."""
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {node.value!r}"
    if isinstance(node, list):
        return f"[{', '.join(map(text_of, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    shown = []
    for name, value in ast.iter_fields(node):
        is_empty = value is None or value == []  # which fields there are depends on the version of Python
        if name not in _LEFT_OUT and not is_empty:
            shown.append(f"{name}={text_of(value)}")
    return f"{type(node).__name__}({', '.join(shown)})"


function_text = functools.cache(text_of)
"""The text of a definition, kept: many fast paths share their helpers."""


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
    """The scope that a function, class or comprehension opens; not to be changed."""
    scope = Scope(is_class=isinstance(node, ast.ClassDef))
    bound: Counter[Any] = Counter()
    elsewhere: set[str | None] = {None}
    expressions = {}
    for inner in nodes_of(node):
        match inner:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                expressions[name] = value
            case ast.Global(names=names):
                scope.globals.update(names)
                elsewhere.update(names)
            case ast.Nonlocal(names=names):
                elsewhere.update(names)
            case ast.Import() | ast.ImportFrom():
                scope.imports |= imports_of(inner)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound[name] += 1
            case _:
                bound[getattr(inner, _BINDS.get(type(inner), ""), None)] += 1
    scope.local = bound.keys() - elsewhere
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


def nodes_of(node: ast.AST, *, with_comprehensions: bool = False) -> Iterator[ast.AST]:
    """Nodes below a node, without those inside of functions, classes and, unless told otherwise, comprehensions."""
    left_out = _OpensScope if with_comprehensions else _OpensScope | _Comprehension
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, left_out):
            yield from nodes_of(child, with_comprehensions=with_comprehensions)
        elif isinstance(child, _Comprehension):
            for inner in ast.walk(child):
                if isinstance(inner, ast.NamedExpr):  # it binds in the scope around
                    yield inner.target


def changed_in(node: ast.AST, methods: Set[str] | None = None) -> ast.expr | None:
    """The object that a node changes, by assigning an attribute or item of it or by calling a method of it.

    `methods` are the names of those that change it; by default all may.
    """
    match node:
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            return owner
        case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
            return owner
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if methods is None or method in methods:
            return owner
    return None


def _changed_by(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module binds or changes; a definition inside of it binds its own name only."""
    if isinstance(statement, _Definition):
        yield statement.name
        return
    for node in nodes_of(statement, with_comprehensions=True):
        match node:
            case ast.Name(id=name, ctx=context):
                if isinstance(statement, ast.Expr) or not isinstance(context, ast.Load):
                    yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=new_name):
                yield (new_name or name).partition(".")[0]
        root = changed_in(node)
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name):
            yield root.id
