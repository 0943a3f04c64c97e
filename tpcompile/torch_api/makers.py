"""Anything that torch calls while it compiles -> the functions and classes in it that others than torch made.

The file of its code decides who made a callable, never its name. Torch, what its compiler
needs, Python itself and this package count as torch; what a wrapper of theirs holds does not.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from tpcompile.evidence.text.lines import installed_in

_SITE = Path(torch.__file__).parents[1]
_PACKAGE = Path(__file__).parents[1]
_NEEDED = ("torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "networkx", "typing_extensions.py")
"""Torch and the packages that its compiler calls; none of them adds a kernel."""
_TORCHS = tuple(str(_SITE / name) + ("" if name.endswith(".py") else "/") for name in _NEEDED)
_PROGRAMS = f"{_PACKAGE / 'gate' / 'faults'}/"
"""Programs of ours that stand for a user's."""
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, ModuleType)
_OPS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
"""Who made an op is known by its registration, not by its object."""
_DATA = (torch.Tensor, torch.nn.Module, torch.fx.Graph, torch.fx.Node)
"""Objects of torch that hold programs and data, and no part of the compiler."""
_MAX_DEPTH = 8
"""Bounds the walk: objects of torch hold one another, and with them much that is no part of the callable."""


@lru_cache(maxsize=4096)
def is_torchs_file(file: str) -> bool:
    """True for a Python file of torch and what it needs, of Python, or of this package."""
    if is_ours(file) or file.startswith(_TORCHS):
        return True
    return file.startswith(_STANDARD) and not installed_in(file)  # which may be inside of the folder of Python's own


def is_ours(file: str) -> bool:
    """True for a file of this package that stands for no user's."""
    return file.startswith(f"{_PACKAGE}/") and not file.startswith(_PROGRAMS)


def made_by_others(value: Any) -> list[Any]:
    """The functions and classes of others in a callable, or in a container of callables, each once.

    Wrappers are looked through: closures, partials, bound methods, objects of torch's classes.
    """
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # keeps each object alive, so that no other gets its id
    pending = deque([(value, 0)])  # nearest first, so that the depth of each object is its least
    while pending:
        one, depth = pending.popleft()
        is_known = isinstance(one, _PLAIN) or id(one) in seen
        if is_known or depth > _MAX_DEPTH:
            continue
        seen[id(one)] = one
        maker = _code(one)
        if is_others(maker):
            found.setdefault(id(maker), maker)
            continue
        for part in _parts(one):
            pending.append((part, depth + 1))
    return list(found.values())


def is_others(made: Any) -> bool:
    """True for a function or class that is neither torch's, Python's nor ours."""
    file = file_of(made)
    return bool(file) and not is_torchs_file(file)


def file_of(made: Any) -> str:
    """The file with the code of a function or class; empty for what Python itself has built in."""
    code = getattr(made, "__code__", None)
    file = getattr(code, "co_filename", "<")
    if not file.startswith("<"):
        return str(file)
    module = str(getattr(made, "__module__", None))
    file = getattr(sys.modules.get(module), "__file__", None)
    typed_in = "<typed in>" if module == "__main__" else ""
    return file or typed_in


def _code(value: Any) -> Any:
    """The function or class that runs when this is called; None for what cannot be called."""
    if isinstance(value, MethodType):
        return value.__func__
    if not callable(value):
        return None
    if hasattr(value, "__qualname__"):  # a function or class, of Python or built in
        return value
    return type(value)


def _parts(value: Any) -> Iterable[Any]:
    """What a container, a wrapper or an object of torch's own holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        attributes = filter(callable, vars(value).values())
        return [*closed_over(value), *attributes]
    if isinstance(value, (type, *_DATA, *_OPS)):
        return []
    if not is_torchs_file(file_of(type(value))):
        return []
    held = getattr(value, "__dict__", {}).values()
    slots = getattr(type(value), "__slots__", ())
    return [*held, *(getattr(value, name, None) for name in slots)]


def closed_over(function: FunctionType) -> Iterator[Any]:
    """The variables that a function has from those around it, as far as they are assigned."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
