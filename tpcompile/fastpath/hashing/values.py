"""Values, classes and functions -> what of them may change a result: items, attributes, state, defaults, own text."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath.hashing.names import MISSING, name_of
from tpcompile.torch_api.makers import closed_over

_NUMBERS = (type(None), bool, int, float, complex, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
SEQUENCES = (tuple, list, deque)
SETS = (set, frozenset)
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
Text = Callable[[Any], str]
"""The text of a part."""


class UntoldError(Exception):
    """A value has no text that is equal in every process; the text says why."""


# Values


def plain_text(value: Any) -> str | None:
    """Text of a value that refers to nothing else; None for others."""
    if value is MISSING:
        return "not defined"
    if type(value) in _NUMBERS:
        return f"{type(value).__name__} {value!r}"
    return repr(value) if isinstance(value, _OF_TORCH) else None


def items(value: Any, text: Text) -> list[str]:
    """Texts of what a container holds: of sets sorted, of others in their order, which may decide a result.

    The order in which modules are imported does not count: of classes as keys, and of functions of several modules.
    Raises UntoldError for a container that changes when it is read.
    """
    if isinstance(value, defaultdict):
        raise UntoldError("it is a defaultdict, which changes when it is read")
    if isinstance(value, Mapping):
        pairs = list(value.items())
        if is_filled_by_modules(value):
            pairs.sort(key=lambda pair: _module_of(pair[1]))
        texts = [f"{text(key)}: {text(each)}" for key, each in pairs]
        is_sorted = all(isinstance(key, type) for key in value)
    else:
        texts = list(map(text, value))
        is_sorted = isinstance(value, SETS)
    return sorted(texts) if is_sorted else texts


def is_filled_by_modules(value: Any) -> bool:
    """True for a mapping to functions of several modules, which the order of imports may order."""
    return isinstance(value, Mapping) and len(set(map(_module_of, value.values()))) > 1


def _module_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")) if callable(value) else ""


def library_text(value: Any, text: Text) -> str:
    """Text of an object of a library: the name that its module has for it, or what pickle would keep of it.

    Raises UntoldError where there is neither: for tensors, open files, locks, iterators.
    """
    name = "" if _is_state(value) else _name_in_module(value)
    if name:
        return f"library {name}"
    kept = pickled(value)
    if isinstance(kept, str):
        return f"library {name_of(value) or kept}"
    return f"{name_of(type(value))} {text(tuple(kept[:3]))}"


def _is_state(value: Any) -> bool:
    """True when no name and no pickle says what it holds in every process."""
    return isinstance(value, Tensor) or hasattr(value, "__next__")


def pickled(value: Any) -> Any:
    """What pickle keeps of an object. Raises UntoldError where that is nothing, or is not made of values."""
    untold = UntoldError(f"it is a {name_of(type(value))}, which has no text")
    if _is_state(value):
        raise untold
    try:
        kept = value.__reduce_ex__(4)
    except Exception as error:  # whatever a class raises
        raise untold from error
    has_iterators = not isinstance(kept, str) and any(each is not None for each in kept[3:])
    if has_iterators:
        raise untold
    return kept


def _name_in_module(value: Any) -> str:
    """The name under which the module of its class, or one above it, has the object itself; empty if none has."""
    module = type(value).__module__
    while module:
        names = [name for name, each in vars(sys.modules.get(module, object)).items() if each is value]
        if names:
            return f"{module}.{min(names)}"
        module = module.rpartition(".")[0]
    return ""


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


def held(value: Any) -> list[Any]:
    """What a value keeps that changes: items of a container, attributes of an object, variables of a closure."""
    if isinstance(value, FunctionType):
        return list(closed_over(value))
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (*SEQUENCES, *SETS)):
        inside += value
    attributes = getattr(value, "__dict__", {})
    return [*inside, *attributes.values()]


# Functions


def defaults_of(function: FunctionType, node: Any) -> Iterator[tuple[str, Any, ast.expr | None]]:
    """Arguments that have a default, each with its value and with its expression in the definition of the function."""
    code, arguments = function.__code__, node.args
    names = code.co_varnames[: code.co_argcount]
    expressions = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    expressions |= {
        each.arg: default for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    for name, value in zip(reversed(names), reversed(function.__defaults__ or ()), strict=False):
        yield name, value, expressions.get(name)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name, value, expressions.get(name)


# Classes


def own_attributes(kind: type) -> dict[str, Any]:
    """Methods and constants of a class itself; members of enums and what Python adds are as its definition says."""
    is_enum = issubclass(kind, Enum)
    has_fields = dataclasses.is_dataclass(kind) or issubclass(kind, tuple)
    found = {}
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, (FunctionType, *_DESCRIPTORS)):
            # Methods that a decorator or base class wrote are defined by the fields.
            is_own = not (has_fields and name.startswith("_") and _has_no_file(value))
        elif is_enum or isinstance(value, MemberDescriptorType | GetSetDescriptorType):
            is_own = False
        else:
            is_method = callable(value) or hasattr(type(value), "__get__")
            is_pythons = name.startswith("_abc_impl") or (name.startswith("__") and not is_method)
            is_own = not is_pythons
        if is_own:
            found[name] = value
    return found


def _has_no_file(method: Any) -> bool:
    function = inspect.unwrap(getattr(method, "__func__", method))
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith("<")
