"""Global variables -> where they are from: statements that define them, through imports; the library they are of."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.fastpath.hashing.names import MISSING, Named
from tpcompile.fastpath.hashing.written import File, file_of
from tpcompile.torch_api import kernels as torch_kernels

IsLibrary = Callable[[str], bool]


def outer_of(function: FunctionType) -> Callable[[str], Named]:
    """Name -> the variable of an enclosing function, a global or a builtin."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    globally = global_of(function.__globals__)

    def outer(name: str) -> Named:
        if name not in cells:
            return globally(name)
        cell = cells[name]
        try:
            return Named(name, cell.cell_contents, "", f"cell {id(cell)}")
        except ValueError:  # not yet assigned
            return Named(name, MISSING)

    return outer


def global_of(namespace: Mapping[str, Any]) -> Callable[[str], Named]:
    """Name -> a global variable of a module, or a builtin."""

    def outer(name: str) -> Named:
        if name in namespace:
            return Named(name, namespace[name], str(namespace.get("__name__", "")), name)
        return Named(name, getattr(builtins, name, MISSING), "builtins", name)

    return outer


def defined(module: str, name: str) -> tuple[str, str, list[ast.stmt]]:
    """Module, name and statements that define a global variable, where its imports end; no statements if none do."""
    seen: set[tuple[str, str]] = set()
    while (module, name) not in seen:
        seen.add((module, name))
        file = _file(module)
        statements = file.statements.get(name, []) if file else []
        if statements and not all(isinstance(statement, ast.ImportFrom) for statement in statements):
            return module, name, statements
        module, name = next(_imported(module, name, statements, file), (module, name))
    return module, name, []


def origin_of(named: Named, is_library: IsLibrary) -> str:
    """`module.name`, as it was imported, of what a library has; empty for what is the program's own.

    A name stays what it is between versions of a library; where the library defines it may change.
    """
    module, name = named.module, named.name
    if not module or is_own(named.value, is_library):
        return ""
    while not is_library(module):
        file = _file(module)
        statements = file.statements.get(name, []) if file else []
        if len(statements) != 1 or not isinstance(statements[0], ast.ImportFrom):
            return ""
        module, name = next(_imported(module, name, statements, None))
        if getattr(sys.modules.get(module), name, MISSING) is not named.value:
            return ""
    return f"{module}.{name}"


def is_own(value: Any, is_library: IsLibrary) -> bool:
    """Whether a value may run code of the program; of modules of a library, others count by name."""
    launch = torch_kernels.triton_launch(value)
    if launch is not None:
        return is_own(launch["fn"], is_library)
    if isinstance(value, CustomOpDef):
        return is_own(torch_kernels.custom_op_function(value), is_library)
    if isinstance(value, FunctionType):
        wrapped = getattr(value, "__wrapped__", None)
        is_in_program = not is_library(str(value.__globals__.get("__name__")))
        return is_in_program or (wrapped is not None and is_own(wrapped, is_library))
    if torch_kernels.op_name(value):
        return True
    kind = value if isinstance(value, type) else type(value)
    return not is_library(kind.__module__)


def kept_by(function: FunctionType, is_library: IsLibrary) -> list[Any]:
    """What a wrapper of a library keeps, in attributes and its closure, of what the program has it run."""
    values = list(vars(function).values())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not yet assigned
            values.append(cell.cell_contents)
    return [value for value in values if _has_own(value, is_library)]


def _has_own(value: Any, is_library: IsLibrary) -> bool:
    inside = value.values() if isinstance(value, Mapping) else [value]
    return any(callable(each) and is_own(each, is_library) for each in inside)


def _file(module: str) -> File | None:
    return file_of(str(getattr(sys.modules.get(module), "__file__", "")))


def _imported(module: str, name: str, statements: list[Any], file: File | None) -> Iterator[tuple[str, str]]:
    """Where a name is imported from, by name or by `*`."""
    for statement in statements:
        for alias in statement.names:
            if (alias.asname or alias.name) == name:
                yield _full_name(module, statement), alias.name
    for statement in file.statements.get("*", []) if file else []:
        full = _full_name(module, statement)
        if hasattr(sys.modules.get(full), name):
            yield full, name


def _full_name(module: str, statement: Any) -> str:
    package = str(getattr(sys.modules.get(module), "__package__", "") or "")
    relative = "." * statement.level + (statement.module or "")
    return importlib.util.resolve_name(relative, package) if statement.level else relative
