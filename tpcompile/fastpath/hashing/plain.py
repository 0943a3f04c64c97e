"""Values that have a text by themselves: numbers, strings, constants and settings of libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import GenericAlias, MethodDescriptorType, UnionType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath.hashing.names import MISSING, Library, name_of

_NUMBERS = (type(None), bool, int, float, complex, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OF_PYTHON = (MethodDescriptorType, WrapperDescriptorType, GenericAlias, UnionType)
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


def library_text(value: Any, text: Callable[[Any], str]) -> str:
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
        found = vars(sys.modules[module]) if module in sys.modules else {}
        yield from sorted(f"{module}.{name}" for name, known in found.items() if known is value)
        module = module.rpartition(".")[0]
