"""Global variables -> where they are from: statements that define them, through imports; the library they are of."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.fastpath.hashing.libraries import is_library_class
from tpcompile.fastpath.hashing.names import MISSING, UNCHANGING, Named
from tpcompile.fastpath.hashing.written import file_of
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
    for place, known, statements in _imports(module, name):
        if not all(isinstance(statement, ast.ImportFrom) for statement in statements):
            return place, known, statements
    return module, name, []


def changing_elsewhere(value: Any, modules: Iterable[str]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Module -> its statements that change an object of another module, or call it, while it is imported."""
    if value is None or isinstance(value, UNCHANGING):
        return
    for module in modules:
        namespace = vars(sys.modules[module])
        file = file_of(str(namespace.get("__file__", "")))
        changing: list[ast.stmt] = []
        for statement in file.tree.body if file else []:
            if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign) and _changes(statement, namespace, value):
                changing.append(statement)
        if changing:
            yield module, changing


def _changes(statement: ast.stmt, namespace: Mapping[str, Any], value: Any) -> bool:
    """Whether a statement has, by a chain of attributes, an object that it calls a method of, or changes."""
    chains: list[ast.AST] = []
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(value=chain)):
                chains.append(chain)
            case ast.Attribute(value=chain, ctx=ast.Store()) | ast.Subscript(value=chain, ctx=ast.Store()):
                chains.append(chain)
    return any(_at(chain, namespace) is value for chain in chains)


def _at(chain: ast.AST, namespace: Mapping[str, Any]) -> Any:
    """The value of `a.b.c` in modules."""
    if isinstance(chain, ast.Name):
        return namespace.get(chain.id)
    if isinstance(chain, ast.Attribute):
        owner = _at(chain.value, namespace)
        return vars(owner).get(chain.attr) if isinstance(owner, ModuleType) else None
    return None


def origin_of(named: Named, is_library: IsLibrary) -> str:
    """`module.name`, as it was imported, of what a library has; empty for what is the program's own.

    A name stays what it is between versions of a library; where the library defines it may change.
    """
    if not named.module or named.attribute or is_own(named.value, is_library):
        return ""
    for module, name, statements in _imports(named.module, named.name):
        known = getattr(sys.modules.get(module), name, MISSING)
        is_same = known is named.value or module == named.module
        if not is_same:  # it was put there from elsewhere
            break
        if is_library(module):
            return f"{module}.{name}"
        if len(statements) != 1:
            break
    return ""


def inner_of(value: Any) -> Any:
    """The function that a wrapper of Triton, torch or functools runs; None for what is none."""
    launch = torch_kernels.triton_launch(value)
    if launch is not None:
        inner = launch["fn"]
    elif isinstance(value, CustomOpDef):
        inner = torch_kernels.custom_op_function(value)
    else:
        inner = inspect.getattr_static(value, "__wrapped__", None)
    return inner


def is_own(value: Any, is_library: IsLibrary) -> bool:
    """Whether a value may run code of the program; of modules of a library, others count by name."""
    inner = inner_of(value)
    if inner is not None and is_own(inner, is_library):
        return True
    if torch_kernels.op_name(value):
        return True
    if isinstance(value, FunctionType):
        return not is_library(str(value.__globals__.get("__name__")))
    kind = value if isinstance(value, type) else type(value)
    return not is_library_class(kind, is_library)


def kept_by(function: FunctionType, is_library: IsLibrary) -> list[Any]:
    """What a wrapper of a library keeps, in attributes and its closure, of what the program has it run."""
    values = list(vars(function).values())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not yet assigned
            values.append(cell.cell_contents)
    kept = []
    for value in values:
        inside = value.values() if isinstance(value, Mapping) else [value]
        functions = filter(callable, inside)
        if any(is_own(function, is_library) for function in functions):
            kept.append(value)
    return kept


def _imports(module: str, name: str) -> Iterator[tuple[str, str, list[ast.stmt]]]:
    """A global variable, and those that it is imported from, each with the statements that bind or change it."""
    seen = set()
    while (module, name) not in seen:
        seen.add((module, name))
        file = file_of(str(getattr(sys.modules.get(module), "__file__", "")))
        known = file.statements if file else {}
        statements = known.get(name, [])
        yield module, name, statements
        if statements:
            module, name = _imported(module, name, statements)
        else:
            stars = [_full_name(module, each) for each in known.get("*", [])]
            module = next((full for full in stars if hasattr(sys.modules.get(full), name)), module)


def _imported(module: str, name: str, statements: list[Any]) -> tuple[str, str]:
    """Where statements of a module import a name from; the name itself where they do not."""
    for statement in statements:
        is_import = isinstance(statement, ast.ImportFrom)
        if not is_import:
            continue
        by_name = {alias.asname or alias.name: alias.name for alias in statement.names}
        if name in by_name:
            full = _full_name(module, statement)
            return full, by_name[name]
    return module, name


def _full_name(module: str, statement: Any) -> str:
    package = str(getattr(sys.modules.get(module), "__package__", "") or "")
    return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
