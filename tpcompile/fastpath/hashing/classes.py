"""Class, instance or function -> what of it may change a result: definition, attributes, state, defaults."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from tpcompile.fastpath.hashing.written import file_of

_MAKES = frozenset({"__init__", "__new__", "__post_init__", "__set_name__", "__setstate__"})
_CHANGES = frozenset({"append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove", "discard"})
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)


def body_of(kind: type) -> list[ast.ClassDef]:
    """The definitions of a class; none for one that was made by a call."""
    file = file_of(str(getattr(sys.modules.get(kind.__module__), "__file__", "")))
    return file.classes(kind.__qualname__) if file else []


def own_attributes(kind: type, *, are_written: bool) -> Iterator[tuple[str, Any]]:
    """Methods and constants of a class itself, by name; what Python adds to it is left out."""
    is_enum = issubclass(kind, Enum)
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, _METHODS):
            yield name, value
            continue
        is_made_by_python = isinstance(value, _SLOTS) or name == "_abc_impl" or name.startswith("__")
        if not is_enum and not is_made_by_python:
            yield name, value
    if is_enum:
        members = kind.__members__.items()  # type: ignore[attr-defined]
        yield "members", [(name, member.value) for name, member in members]
    if dataclasses.is_dataclass(kind) and not are_written:
        fields = dataclasses.fields(kind)
        yield "fields", [(each.name, each.default, each.default_factory) for each in fields]


def is_generated(kind: type, value: Any) -> bool:
    """True for a method that a decorator or base class wrote, which the fields of the class define."""
    value = inspect.unwrap(getattr(value, "__func__", value))
    if not isinstance(value, FunctionType) or not value.__code__.co_filename.startswith("<"):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, tuple)


def state_of(value: Any) -> dict[str, Any]:
    """Attributes of an instance itself; of one that is also a number, that too."""
    kind = type(value)
    state = dict(getattr(value, "__dict__", {}))
    slots = [name for name, each in inspect.getmembers_static(kind) if isinstance(each, MemberDescriptorType)]
    for name in slots:
        if hasattr(value, name):
            state[name] = getattr(value, name)
    for base in (int, float, bytes):
        if isinstance(value, base):
            state["itself"] = base.__repr__(value)
    state.pop("__wrapped__", None)
    return {name: each for name, each in state.items() if not _is_cached(value, name)}


def _is_cached(value: Any, name: str) -> bool:
    """Whether an attribute is the result of a method, which was called or was not."""
    return isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)


def changing_attributes(kind: type) -> set[str]:
    """Attributes that the methods of a class itself store or change after an instance was made."""
    methods: list[Any] = []
    for body in body_of(kind):
        methods += [node for node in body.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    changing: set[str] = set()
    for method in methods:
        if method.name not in _MAKES:
            changing.update(_changed(method))
    return changing


def _changed(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    own = arguments[0].arg if arguments else ""
    for target in filter(None, map(_target, ast.walk(method))):
        while isinstance(target, ast.Subscript):
            target = target.value
        match target:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == own:
                yield attr


def _target(node: ast.AST) -> ast.expr | None:
    """What a node stores into or changes by a method; None for others."""
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return node
        case ast.Call(func=ast.Attribute(value=target, attr=attr)) if attr in _CHANGES:
            return target
    return None


def default_values(function: FunctionType) -> dict[str, Any]:
    """Argument -> default."""
    positional = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(positional) : code.co_argcount]
    return {**dict(zip(names, positional, strict=True)), **(function.__kwdefaults__ or {})}


def default_expressions(node: Any) -> dict[str, ast.expr]:
    """Argument -> the expression of its default, in the definition of a function."""
    positional = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) :] if node.args.defaults else []
    by_place = zip([*positional, *node.args.kwonlyargs], [*node.args.defaults, *node.args.kw_defaults], strict=True)
    return {argument.arg: default for argument, default in by_place if default is not None}
