"""Code object, class or global variable -> where it is written: its syntax tree, and that as text.

The text is made of the fields of the tree, not of bytecode or `ast.unparse`, which differ between versions of Python.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from tpcompile.errors import ConfigError

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
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
            if isinstance(node, _FUNCTIONS):
                found[_first_line(node)].append(node)
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
        nodes: list[ast.AST] = [self.tree]
        for name in qualname.replace(".<locals>", "").split("."):
            inside = itertools.chain.from_iterable(map(_definitions, nodes))
            nodes = [node for node in inside if node.name == name]
        found = filter(lambda node: isinstance(node, ast.ClassDef), nodes)
        return list(found)  # type: ignore[arg-type]


_FILES: dict[str, File] = {}


def file_of(name: str, module: Mapping[str, Any] | None = None) -> File | None:
    """A file of Python source; None when it cannot be found or read. `module` are the globals of its module."""
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name, dict(module) if module else None))
    known = _FILES.get(name)
    if known is not None and known.text == text:
        return known
    if not text:
        return None
    try:
        _FILES[name] = File(text, ast.parse(text))
    except SyntaxError:
        return None
    return _FILES[name]


def function_of(code: CodeType, module: Mapping[str, Any]) -> Function | None:
    """The definition of a function; None when it is in no file."""
    file = file_of(code.co_filename, module)
    functions = file.functions if file else {}
    begin_there = functions.get(code.co_firstlineno, [])
    named = [node for node in begin_there if getattr(node, "name", "<lambda>") == code.co_name]
    if len(named) == 1:
        return named[0]
    holding = [node for node in named if _holds(node, code)]
    return min(holding, key=_size, default=None)


def definition_of(function: FunctionType) -> Function:
    """The definition of a function; ConfigError when it is in no file."""
    found = function_of(function.__code__, function.__globals__)
    if found is None:
        raise ConfigError(
            f"Python finds no source of {function.__module__}.{function.__name__}, so changes of it could not be "
            "detected; define it in a file"
        )
    return found


@functools.cache  # many fast paths share their helpers
def function_text(node: Function) -> str:
    """The text of a definition."""
    return text_of(node)


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


def _first_line(node: Function) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _holds(node: Function, code: CodeType) -> bool:
    """Whether all instructions of the code lie inside of one of several functions that begin on a line."""
    inside = node.body if isinstance(node, ast.Lambda) else node
    begin = (inside.lineno, inside.col_offset)
    end = _end(inside)
    instructions = list(filter(all, code.co_positions()))  # without those of Python's own
    begins = [(line, column) for line, _, column, _ in instructions]
    ends = [(line, column) for _, line, _, column in instructions]
    return min(begins, default=begin) >= begin and max(ends, default=end) <= end  # type: ignore[type-var]  # no None


def _size(node: Function) -> tuple[int, int]:
    line, column = _end(node)
    return line - node.lineno, column - node.col_offset


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _definitions(node: ast.AST) -> Iterator[Any]:
    """Classes and functions below a node, without those inside of them; of `<locals>` those of the function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _definitions(child)


def _changed_by(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module binds or changes; a definition inside of it binds its own name only."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    is_call = isinstance(statement, ast.Expr)
    for node in _outside_of_definitions(statement):
        match node:
            case ast.Name(id=name, ctx=context):
                if is_call or not isinstance(context, ast.Load):
                    yield name
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                yield from _root(node)
            case ast.Call(func=ast.Attribute() as method):
                yield from _root(method)
            case ast.alias(name=name, asname=new_name):
                yield (new_name or name).partition(".")[0]


def _outside_of_definitions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield from _outside_of_definitions(child)
        elif not isinstance(child, ast.Lambda):
            yield ast.Name(child.name, ast.Store())


def _root(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id
