"""Values -> their texts, by themselves or by those of their parts: numbers, containers, methods, library objects."""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    GenericAlias,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath.hashing.names import MISSING, Library, name_of

_NUMBERS = (type(None), bool, int, float, complex, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OF_PYTHON = (MethodDescriptorType, WrapperDescriptorType, GenericAlias, UnionType)
SEQUENCES = (tuple, list, deque)
SETS = (set, frozenset)
CACHES = (dict, list, set, deque)
"""Defaults of these kinds that a function changes are caches."""
Text = Callable[[Any], str]
"""The text of a part."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class UntoldError(Exception):
    """A value has no text that is equal in every process; the text says why."""


class NoSourceError(UntoldError):
    """A function is in no file: the statement that defines its name does not say what it runs."""


def plain_text(value: Any) -> str | None:
    """Text of a value that refers to nothing else; None for others."""
    if value is MISSING:
        return "not defined"
    if type(value) in _NUMBERS:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, _OF_TORCH):
        return repr(value)
    if isinstance(value, Library):
        return f"library {value.name}"
    if isinstance(value, _OF_PYTHON):
        return plain_name(value)
    return None


def plain_name(value: Any) -> str:
    """Text of a function or type of Python itself."""
    return f"library {name_of(value) or value}"


def items(value: Any, text: Text) -> list[str]:
    """Texts of what a container holds: of sets sorted, of others in their order, which may decide a result.

    Raises UntoldError for a container that changes when it is read.
    """
    if isinstance(value, defaultdict):
        raise UntoldError("it is a defaultdict, which changes when it is read")
    if isinstance(value, SETS):
        return sorted(map(text, value))
    if isinstance(value, Mapping):
        return [f"{text(key)}: {text(each)}" for key, each in value.items()]
    return [text(each) for each in value]


def _partial(value: Any, text: Text) -> str:
    return f"partial {text(value.func)} {text(value.args)} {text(value.keywords)}"


def _method(value: MethodType, text: Text) -> str:
    return f"method {text(value.__func__)} of {text(value.__self__)}"


def _builtin(value: Any, text: Text) -> str:
    name = plain_name(value)
    owner = getattr(value, "__self__", None)
    is_of_object = owner is not None and not isinstance(owner, ModuleType)
    return f"{name} of {text(owner)}" if is_of_object else name


def _descriptor(value: Any, text: Text) -> str:
    names = ("__func__", "fget", "fset", "fdel", "func")
    parts = [getattr(value, name, None) for name in names]
    return f"{type(value).__name__} {', '.join(text(part) for part in parts if part is not None)}"


JOINED: list[tuple[Any, Callable[[Any, Text], str]]] = [
    (functools.partial, _partial),
    (MethodType, _method),
    ((BuiltinFunctionType, MethodWrapperType), _builtin),
    ((staticmethod, classmethod, property, functools.cached_property), _descriptor),
]
"""Kinds of values whose text is made of those of their parts."""


def library_text(value: Any, text: Text) -> str:
    """Text of an object of a library: the name that its module has for it, or what pickle would keep of it.

    Raises UntoldError where there is neither: for tensors, open files, locks, iterators.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor) or hasattr(value, "__next__"):
        raise UntoldError(f"it is a {kind}, which has no text")
    name = next(_names_of(value), None)
    if name is not None:
        return f"library {name}"
    try:
        kept = value.__reduce_ex__(4)
    except Exception as error:  # whatever a class raises
        raise UntoldError(f"it is a {kind}, which has no text") from error
    found = kept if isinstance(kept, str) else text(tuple(kept[:3]))
    if _ADDRESS.search(found) or (isinstance(kept, tuple) and any(part is not None for part in kept[3:])):
        raise UntoldError(f"it is a {kind}, which has no text")
    return f"{kind} {found}"


def _names_of(value: Any) -> Iterator[str]:
    """Names under which the module of its class, or one above it, has the object itself."""
    module = type(value).__module__
    while module:
        names = []
        for name, known in vars(sys.modules.get(module, object)).items():
            if known is value:
                names.append(f"{module}.{name}")
        yield from sorted(names)
        module = module.rpartition(".")[0]
