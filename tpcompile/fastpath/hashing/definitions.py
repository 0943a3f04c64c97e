"""Global variables -> where they are from: statements that define them, through imports; the library they are of."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.fastpath.hashing.libraries import Libraries
from tpcompile.fastpath.hashing.names import MISSING, UNCHANGING, Named
from tpcompile.fastpath.hashing.trees import changed_in, file_of, imports_of
from tpcompile.torch_api import kernels as torch_kernels
from tpcompile.torch_api.makers import closed_over


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
        changing: list[ast.stmt] = []
        for statement in file_of(str(namespace.get("__file__", ""))).tree.body:
            if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign):
                continue
            owners = map(changed_in, ast.walk(statement))
            if any(_at(owner, namespace) is value for owner in owners):  # by a chain of attributes, or by a method
                changing.append(statement)
        if changing:
            yield module, changing


def _at(chain: ast.expr | None, namespace: Mapping[str, Any]) -> Any:
    """The value of `a.b.c` in modules."""
    if isinstance(chain, ast.Name):
        return namespace.get(chain.id)
    if isinstance(chain, ast.Attribute):
        owner = _at(chain.value, namespace)
        return vars(owner).get(chain.attr) if isinstance(owner, ModuleType) else None
    return None


def origin_of(named: Named, libraries: Libraries) -> str:
    """`module.name`, as it was imported, of what a library has; empty for what is the program's own.

    A name stays what it is between versions of a library; where the library defines it may change.
    """
    if not named.module or named.attribute or is_own(named.value, libraries):
        return ""
    for module, name, statements in _imports(named.module, named.name):
        is_first = module == named.module
        is_same = is_first or getattr(sys.modules.get(module), name, MISSING) is named.value
        if not is_same:  # it was put there from elsewhere
            return ""
        if libraries.have(module):
            return f"{module}.{name}"
        if len(statements) != 1:
            return ""
    return ""


def inner_of(value: Any) -> Any:
    """The function that a wrapper of Triton, torch or functools runs; None for what is none."""
    launch = torch_kernels.triton_launch(value)
    if launch is not None:
        return launch["fn"]
    if isinstance(value, CustomOpDef):
        return torch_kernels.custom_op_function(value)
    return inspect.getattr_static(value, "__wrapped__", None)


def is_own(value: Any, libraries: Libraries) -> bool:
    """True for a value that may run code of the program; of modules of a library, others count by name."""
    inner = inner_of(value)
    runs_own = inner is not None and is_own(inner, libraries)
    if runs_own or torch_kernels.op_name(value):
        return True
    if isinstance(value, FunctionType):
        return not libraries.have(str(value.__globals__.get("__name__")))
    kind = value if isinstance(value, type) else type(value)
    return not libraries.have_class(kind)


def kept_by(function: FunctionType, libraries: Libraries) -> list[Any]:
    """What a wrapper of a library keeps, in attributes and its closure, of what the program has it run."""
    kept = []
    for value in (*vars(function).values(), *closed_over(function)):
        inside = value.values() if isinstance(value, Mapping) else [value]
        functions = filter(callable, inside)
        if any(is_own(function, libraries) for function in functions):
            kept.append(value)
    return kept


def _imports(module: str, name: str) -> Iterator[tuple[str, str, list[ast.stmt]]]:
    """A global variable, and those that it is imported from, each with the statements that bind or change it."""
    seen = set()
    while (module, name) not in seen:
        seen.add((module, name))
        known = file_of(str(getattr(sys.modules.get(module), "__file__", ""))).statements
        yield module, name, known.get(name, [])
        module, name = _imported(module, name, known.get(name, known.get("*", [])))


def _imported(module: str, name: str, statements: list[ast.stmt]) -> tuple[str, str]:
    """Module and name that statements of a module import a name from; its own where they do not."""
    package = str(getattr(sys.modules.get(module), "__package__", "") or "")
    for statement in statements:
        if not isinstance(statement, ast.ImportFrom):
            continue
        for bound, (place, attr, level) in imports_of(statement).items():
            full = importlib.util.resolve_name("." * level + place, package)
            if bound == name:
                return full, attr
            if bound == "*" and hasattr(sys.modules.get(full), name):
                return full, name
    return module, name
