"""Values -> their texts, by themselves or by those of their parts: numbers, containers, library objects."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath.hashing.names import MISSING, name_of

_NUMBERS = (type(None), bool, int, float, complex, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
SEQUENCES = (tuple, list, deque)
SETS = (set, frozenset)
Text = Callable[[Any], str]
"""The text of a part."""


class UntoldError(Exception):
    """A value has no text that is equal in every process; the text says why."""


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
        is_by_class = all(isinstance(key, type) for key in value)
        return sorted(texts) if is_by_class else texts
    texts = list(map(text, value))
    if isinstance(value, SETS):
        texts.sort()
    return texts


def is_filled_by_modules(value: Any) -> bool:
    """Whether a container is a mapping to functions of several modules, which the order of imports may order."""
    modules = set(map(_module_of, value.values())) if isinstance(value, Mapping) else set()
    return len(modules) > 1


def _module_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")) if callable(value) else ""


def descriptor_text(value: Any, text: Text) -> str:
    """Text of a static or class method or a property: those of its functions."""
    names = ("__func__", "fget", "fset", "fdel", "func")
    parts = [getattr(value, name, None) for name in names]
    return f"{type(value).__name__} {', '.join(text(part) for part in parts if part is not None)}"


def library_text(value: Any, text: Text) -> str:
    """Text of an object of a library: the name that its module has for it, or what pickle would keep of it.

    Raises UntoldError where there is neither: for tensors, open files, locks, iterators.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not _is_state(value):
        name = _name_in_module(value)
        if name:
            return f"library {name}"
    kept = pickled(value)
    if isinstance(kept, str):
        return f"library {name_of(value) or kept}"
    return f"{kind} {text(tuple(kept[:3]))}"


def _is_state(value: Any) -> bool:
    """Whether no name and no pickle says what it holds in every process."""
    return isinstance(value, Tensor) or hasattr(value, "__next__")


def pickled(value: Any) -> Any:
    """What pickle keeps of an object. Raises UntoldError where that is nothing, or is not made of values."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    untold = UntoldError(f"it is a {kind}, which has no text")
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
        known = vars(sys.modules.get(module, object))
        names = [name for name, each in known.items() if each is value]
        if names:
            return f"{module}.{min(names)}"
        module = module.rpartition(".")[0]
    return ""
