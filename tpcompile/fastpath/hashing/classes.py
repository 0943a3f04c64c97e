"""Class or instance -> what of it may change a result: the definition, attributes, state."""

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
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)


def body_of(kind: type) -> list[ast.ClassDef]:
    """The definitions of a class; none for one that was made by a call."""
    file = file_of(str(getattr(sys.modules.get(kind.__module__), "__file__", "")))
    return file.classes(kind.__qualname__) if file else []


def own_attributes(kind: type, *, are_written: bool) -> Iterator[tuple[str, Any]]:
    """Methods and constants of a class itself, by name; what Python adds to it is left out."""
    for name, value in sorted(vars(kind).items()):
        is_method = isinstance(value, _METHODS)
        is_dunder = name.startswith("__") and name.endswith("__")
        if isinstance(value, MemberDescriptorType | GetSetDescriptorType) or name == "_abc_impl":
            continue
        if issubclass(kind, Enum) and not is_method:
            continue
        if is_method or not is_dunder:
            yield name, value
    if issubclass(kind, Enum):
        yield "members", [(member.name, member.value) for member in kind]
    if dataclasses.is_dataclass(kind) and not are_written:
        yield "fields", [(each.name, each.default, each.default_factory) for each in dataclasses.fields(kind)]


def is_generated(kind: type, value: Any) -> bool:
    """True for a method that a decorator or base class wrote, which the fields of the class define."""
    value = inspect.unwrap(getattr(value, "__func__", value))
    if not isinstance(value, FunctionType) or not value.__code__.co_filename.startswith("<"):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, tuple)


def state_of(value: Any) -> dict[str, Any]:
    """Attributes of an instance itself; of one that is also a number, string or container, that too."""
    state = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                state[name] = getattr(value, name)
    for base in (int, float, bytes):
        if isinstance(value, base):
            state["itself"] = base.__repr__(value)
    return {name: each for name, each in state.items() if name != "__wrapped__" and not _is_cached(value, name)}


def _is_cached(value: Any, name: str) -> bool:
    """Whether an attribute is the result of a method, which was called or was not."""
    return isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)


def changing_attributes(kind: type) -> set[str]:
    """Attributes that the methods of a class itself store or change after an instance was made."""
    found: set[str] = set()
    for body in body_of(kind):
        for method in body.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name not in _MAKES:
                found.update(_changed(method))
    return found


def _changed(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    own = arguments[0].arg if arguments else ""
    for node in ast.walk(method):
        target: ast.AST | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            target = node.func.value
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == own:
            yield target.attr
