"""Launcher of a fused kernel -> one hash: its source, the Triton kernels and helpers that it names, their constants."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.errors import ConfigError
from tpcompile.evidence.records import UserLine
from tpcompile.torch_api import kernels as torch_kernels

_WRAPS = ("fn", "__wrapped__")
"""Where a wrapper keeps its function: Triton's kernels and autotuners, functools."""


@dataclass(frozen=True)
class Source:
    """The code that a launcher runs, and its hash."""

    sha256: str
    """Of the code without comments and layout, 16 hex digits."""
    kernels: frozenset[str]
    """Names of its Triton kernels, `module.function`."""
    ops: frozenset[str] = frozenset()
    """Names of its custom ops, `namespace::op`."""
    functions: frozenset[FunctionType] = field(default=frozenset(), compare=False)
    """All Python functions that were read: the launcher, kernels, helpers and backwards."""


@dataclass
class _Found:
    parts: dict[str, str] = field(default_factory=dict)
    """`module.function`, or that and the name of a constant -> text."""
    kernels: set[str] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)
    functions: set[FunctionType] = field(default_factory=set)


def source_of(launcher: Callable[..., Any]) -> Source:
    """Follow the functions and constants that a launcher or a Triton kernel names in its own top-level package.

    Raises ConfigError when Python cannot find the source, as for code that was typed into an interpreter.
    """
    found = _Found()
    _read(launcher, found)
    text = "\n".join(f"{name}\n{found.parts[name]}" for name in sorted(found.parts))
    return Source(
        hashlib.sha256(text.encode()).hexdigest()[:16],
        frozenset(found.kernels),
        frozenset(found.ops),
        frozenset(found.functions),
    )


def python_function(wrapped: Any) -> FunctionType | None:
    """The Python function below Triton's, functools' and torch's wrappers; None when there is none."""
    while not isinstance(wrapped, FunctionType) or hasattr(wrapped, "__wrapped__"):
        wrapped = _inner(wrapped)
        if wrapped is None:
            return None
    return wrapped


def _inner(wrapped: Any) -> Any:
    if isinstance(wrapped, CustomOpDef):
        return torch_kernels.custom_op_function(wrapped)
    return next((getattr(wrapped, name) for name in _WRAPS if hasattr(wrapped, name)), None)


def line_of(function: FunctionType) -> UserLine:
    """Where the function is."""
    file = inspect.getsourcefile(function) or "?"
    return UserLine(file=file, line=function.__code__.co_firstlineno, function=function.__qualname__)


def kernel_name(function: FunctionType) -> str:
    """As it stands in a graph: `module.function`."""
    return f"{function.__module__}.{function.__name__}"


def _read(wrapped: Any, found: _Found) -> None:
    function = python_function(wrapped)
    if function is None:
        raise ConfigError(f"{wrapped!r} is not a Python function, nor a Triton kernel or custom op made from one")
    key = f"{function.__module__}.{function.__qualname__}"
    if _is_triton(wrapped):
        found.kernels.add(kernel_name(function))
    if function in found.functions:
        return
    found.functions.add(function)
    found.parts[_free(key, found)] = _text(function)
    if isinstance(wrapped, CustomOpDef):
        found.ops.add(torch_kernels.custom_op_name(wrapped))
        for part in torch_kernels.custom_op_backward(wrapped):
            _read(part, found)
    for name, value in _named(function):
        if _is_followed(value, function):
            _read(value, found)
        elif _is_constant(value):
            found.parts[f"{key}: {name}"] = repr(getattr(value, "value", value))


def _free(key: str, found: _Found) -> str:
    """`key`, marked where two functions have one name."""
    return key if key not in found.parts else _free(f"{key}'", found)


def _text(function: FunctionType) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        name = kernel_name(function)
        raise ConfigError(
            f"Python finds no source of {name}, so changes of it could not be detected; define it in a file"
        ) from error
    try:
        return ast.unparse(ast.parse(textwrap.dedent(source)))
    except SyntaxError:  # a lambda, whose source is the line around it
        return source


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals and closure variables that its code names; of modules, the attributes that it names."""
    names = _names(function.__code__)
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    outer = {**function.__globals__, **{name: cell.cell_contents for name, cell in closure}}
    for name in sorted(names & outer.keys()):
        value = outer[name]
        is_module = isinstance(value, ModuleType)
        if not is_module or _package(value.__name__) != _package(function.__module__):
            yield name, value
            continue
        for part in sorted(names & vars(value).keys()):
            yield f"{name}.{part}", getattr(value, part)


def _names(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_followed(value: Any, user: FunctionType) -> bool:
    """True for a Triton kernel, and for a function of the same package."""
    function = python_function(value) if callable(value) and not isinstance(value, type) else None
    if function is None:
        return False
    return _package(function.__module__) == _package(user.__module__)


def _is_triton(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "triton"


def _is_constant(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple) or (_is_triton(value) and hasattr(value, "value"))


def _package(module: str | None) -> str:
    return (module or "__main__").partition(".")[0]  # None for code that was executed without a module
