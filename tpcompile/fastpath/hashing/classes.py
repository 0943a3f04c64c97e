"""Class, instance or function -> what of it may change a result: definition, attributes, state, defaults."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from tpcompile.fastpath.hashing.plain import SEQUENCES, SETS, pickled
from tpcompile.fastpath.hashing.scopes import CHANGES
from tpcompile.fastpath.hashing.written import file_of

_MAKES = frozenset({"__init__", "__new__", "__post_init__", "__set_name__", "__setstate__"})
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)


def body_of(kind: type) -> list[ast.ClassDef]:
    """The definitions of a class; none for one that was made by a call."""
    file = file_of(str(getattr(sys.modules.get(kind.__module__), "__file__", "")))
    return file.classes(kind.__qualname__) if file else []


def own_attributes(kind: type) -> dict[str, Any]:
    """Methods and constants of a class itself; members of enums and what Python adds are as its definition says."""
    found = {}
    is_enum = issubclass(kind, Enum)
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, _METHODS):
            is_own = not (name.startswith("_") and _is_generated(kind, value))
        elif isinstance(value, _SLOTS):
            is_own = False
        else:
            is_method = callable(value) or hasattr(type(value), "__get__")
            is_pythons = name.startswith("_abc_impl") or (name.startswith("__") and not is_method)
            is_own = not is_pythons and not is_enum
        if is_own:
            found[name] = value
    return found


def _is_generated(kind: type, value: Any) -> bool:
    """True for a method that a decorator or base class wrote, which the fields of the class define."""
    value = inspect.unwrap(getattr(value, "__func__", value))
    if not isinstance(value, FunctionType) or not value.__code__.co_filename.startswith("<"):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, tuple)


def state_of(value: Any) -> dict[str, Any]:
    """Attributes of an instance itself, without results of methods that are cached; of a number, that too."""
    state = dict(getattr(value, "__dict__", {}))
    state.pop("__wrapped__", None)
    for name, each in inspect.getmembers_static(type(value)):
        if isinstance(each, functools.cached_property):
            state.pop(name, None)
        elif isinstance(each, MemberDescriptorType) and hasattr(value, name):
            state[name] = getattr(value, name)
    native = _native(type(value))
    if native in (int, float, complex, bytes):
        state["itself"] = native.__repr__(value)
    elif native is not None:
        made, arguments, kept = (*pickled(value), None)[:3]
        state["itself"] = made, arguments, None if isinstance(kept, dict) else kept  # a dict is that of attributes
    return state


def _native(kind: type) -> Any:
    """The base of a class that keeps more than attributes, since it is written in C; None where there is none."""
    bases = [base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), BuiltinFunctionType)]
    return next((base for base in bases if base not in (object, *SEQUENCES, *SETS, dict, str)), None)


def has_caches(kind: type) -> bool:
    """Whether results of methods are kept in attributes, which may have been set as well."""
    return any(isinstance(each, functools.cached_property) for _, each in inspect.getmembers_static(kind))


def held(value: Any) -> list[Any]:
    """What a value keeps that changes: items of a container, attributes of an object, variables of a closure."""
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    items = list(value.values()) if isinstance(value, Mapping) else []
    if isinstance(value, (*SEQUENCES, *SETS)):
        items = list(value)
    return [*items, *getattr(value, "__dict__", {}).values()]


def changing_attributes(kind: type, used: frozenset[str]) -> set[str]:
    """Attributes that the methods of a class itself store or change after an instance was made.

    `used` are the names of attributes that the launcher uses. Other methods fill a registry or settings while modules
    are imported, and what they keep counts as it is.
    """
    changing: set[str] = set()
    for body in body_of(kind):
        for method in body.body:
            match method:
                case ast.FunctionDef(name=name, args=arguments) if is_called(name, used):
                    own = [*arguments.posonlyargs, *arguments.args, ast.arg("")][0]
                    changing.update(_changed(method, own.arg))
    return changing


def is_called(name: str, used: Set[str]) -> bool:
    """Whether a launcher may call a method of an object that was made before."""
    is_pythons = name.startswith("__") and name.endswith("__")
    return name in used or (is_pythons and name not in _MAKES)


def _changed(method: ast.FunctionDef, own: str) -> Iterator[str]:
    """Attributes of the argument `own` that a method changes."""
    for node in ast.walk(method):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                target: ast.AST = node
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if name in CHANGES:
                pass
            case _:
                continue
        while isinstance(target, ast.Subscript):
            target = target.value
        match target:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == own:
                yield attr


def default_values(function: FunctionType) -> dict[str, Any]:
    """Argument -> default."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    positional = zip(reversed(names), reversed(function.__defaults__ or ()), strict=False)
    return dict(positional) | (function.__kwdefaults__ or {})


def default_expressions(node: Any) -> dict[str, Any]:
    """Argument -> the expression of its default, in the definition of a function."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    positional = zip(reversed(names), reversed(node.args.defaults), strict=False)
    keyword_only = [argument.arg for argument in node.args.kwonlyargs]
    return dict(positional) | dict(zip(keyword_only, node.args.kw_defaults, strict=True))
