"""Syntax tree of a function -> what it names outside of itself, what it changes there, which files it reads.

Names are resolved as Python resolves them: attributes of modules and classes to the end of the chain, imports inside of
the function, `getattr` and `import_module` with a constant. What depends on a value that is only known when the
function runs is refused.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from tpcompile.fastpath.hashing.paths import file_of_call, paths_of, reads_file
from tpcompile.fastpath.hashing.scopes import Scope, scope_of

MISSING = object()
"""The value of a name that nothing defines."""


@dataclass(frozen=True)
class Library:
    """A module of a library that is not imported, or what it would have."""

    name: str


_CHANGES = frozenset({
    "append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard",
    "appendleft", "popleft", "extendleft", "subtract", "difference_update", "intersection_update", "sort", "reverse",
    "set", "reset",
})  # fmt: skip
"""Methods that change what they are called on."""
_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, Library)
_RUNS_TEXT = (eval, exec, compile, globals)


@dataclass(frozen=True)
class Named:
    """A name of the function that means something outside of it."""

    label: str
    """As it is written: `consts.EPS`."""
    value: Any
    module: str = ""
    """The module that has it, or what has it, as a global variable; empty for variables of enclosing functions."""
    name: str = ""
    owner: str = ""
    """The class or function that has it as an attribute; empty for others."""
    attr: str = ""


@dataclass
class Found:
    """What a tree names."""

    named: list[Named] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    """Ids of objects that it changes."""
    rebound: set[tuple[str, str]] = field(default_factory=set)
    """Global variables that it assigns, by module and name, and attributes by class or function and name."""
    files: list[tuple[str, list[Any] | None]] = field(default_factory=list)
    """Expressions of files that it reads -> the files, None where they are computed."""
    refused: list[str] = field(default_factory=list)


class Names(ast.NodeVisitor):
    """Visit a function or a statement of a module; what was found is in `found`."""

    def __init__(self, outer: Callable[[str], Named], *, is_library: Callable[[str], bool], package: str) -> None:
        self.found = Found()
        self._outer, self._is_library, self._package = outer, is_library, package
        self._scopes: list[Scope] = []
        self.changed_arguments: set[str] = set()
        """Local variables that are changed in place: defaults of arguments among them are caches."""

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Found:
        """The body of a function, and the arguments of decorators from libraries: they may change what runs."""
        decorators = [each for each in getattr(node, "decorator_list", []) if isinstance(each, ast.Call)]
        for decorator in decorators:
            if self._is_of_library(decorator.func):
                self._visit_all(decorator.args)
                self._visit_all(decorator.keywords)
        self._visit_body(node)
        return self.found

    def statements(self, nodes: Iterable[ast.AST]) -> Found:
        """Statements of a module or class."""
        self._visit_all(nodes)
        return self.found

    def class_body(self, node: ast.ClassDef) -> Found:
        """What the definition of a class evaluates, without its methods."""
        methods = (ast.FunctionDef, ast.AsyncFunctionDef)
        self._within(node, [inner for inner in node.body if not isinstance(inner, methods)])
        return self.found

    # Scopes

    def _within(self, node: ast.AST, inside: Iterable[ast.AST]) -> None:
        self._scopes.append(scope_of(node))
        self._visit_all(inside)
        self._scopes.pop()

    def _visit_body(self, node: Any) -> None:
        is_lambda = isinstance(node, ast.Lambda)
        self._within(node, [node.body] if is_lambda else node.body)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_FunctionDef(self, node: Any) -> None:
        """A function inside: its defaults and decorators are those of the function around it."""
        defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None]
        self._visit_all([*getattr(node, "decorator_list", []), *defaults])
        self._visit_body(node)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class inside."""
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._within(node, node.body)

    def visit_ListComp(self, node: Any) -> None:
        """A comprehension: the first iterable is evaluated outside of it."""
        self.visit(node.generators[0].iter)
        self._within(node, ast.iter_child_nodes(node))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Its annotation is not evaluated where it matters."""
        self._visit_all([node.target, *([node.value] if node.value else [])])

    def visit_Import(self, node: ast.Import) -> None:
        """Modules that it imports: what it names of them may be in one that nothing else has imported yet."""
        for alias in node.names:
            self._module(alias.name, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Of an import inside of the function, what it names."""
        for alias in node.names:
            named = self._resolve(ast.Name(alias.asname or alias.name, ast.Load()))
            if named is not None and not isinstance(named.value, ModuleType):
                self._emit(named)

    # Names

    def visit_Name(self, node: ast.Name) -> None:
        """A name by itself."""
        named = self._resolve(node)
        if named is None:
            return
        if not isinstance(node.ctx, ast.Load):
            if any(node.id in scope.assigned_outside for scope in self._scopes):
                self.found.rebound.add((named.module, named.name))
            return
        if isinstance(named.value, ModuleType) and not self._is_library(named.value.__name__):
            self._refuse(f"{named.label}, a module, is used as a value: write `{named.label}.NAME` where it is used")
        else:
            self._emit(named)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A chain of attributes, to its end or to the first value that is no module or class."""
        if not isinstance(node.ctx, ast.Load):
            self._change(node.value, node.attr)
        named = self._resolve(node)
        if named is None:
            self.generic_visit(node)
        else:
            self._emit(named)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """An item: one that is stored changes the whole."""
        if not isinstance(node.ctx, ast.Load):
            self._change(node.value)
        named = self._resolve(node.value)
        if named is not None and named.value is sys.modules:
            self._refuse("sys.modules is searched: import the module")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A call: of `getattr` and imports, of what reads files, of what runs text, of what changes a global."""
        resolved = self._resolve(node)
        if resolved is not None:
            self._emit(resolved)
            self._visit_all(node.args[2:])
            return
        self._look_at_call(node)
        self.generic_visit(node)

    def _look_at_call(self, node: ast.Call) -> None:
        function = self._resolve(node.func)
        value = function.value if function else None
        called = name_of(value) if function else ""
        first = self._resolve(node.args[0]) if node.args else None
        if any(value is runner for runner in _RUNS_TEXT):
            self._refuse(f"it calls {called.removeprefix('builtins.')}(), so what it runs cannot be read")
        elif value in (importlib.import_module, __import__):
            self._refuse(f"{ast.unparse(node)} imports what is computed: name the module")
        elif value is getattr and first and isinstance(first.value, ModuleType) and self._is_own(first.value):
            self._refuse(f"{ast.unparse(node)} computes the name of the attribute: write the name")
        elif value is setattr and node.args:
            self._change(node.args[0])
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            self._change(node.func.value)
        self._look_at_files(node, called)

    def _look_at_files(self, node: ast.Call, called: str) -> None:
        if not reads_file(node, called):
            return
        place = file_of_call(node, called)
        files = paths_of(place, self._path_value, self._assigned) if place is not None else None
        self.found.files.append((ast.unparse(node), files))

    def _path_value(self, name: str) -> Any:
        named = self._resolve(ast.Name(name, ast.Load()))
        return named.value if named else None

    def _assigned(self, name: str) -> ast.expr | None:
        return next((scope.once[name] for scope in reversed(self._scopes) if name in scope.once), None)

    # Resolving

    def _resolve(self, node: ast.AST) -> Named | None:
        """What an expression means outside of the function; None where it depends on a local variable or a call."""
        match node:
            case ast.Name(id=name):
                return self._look_up(name)
            case ast.Attribute(value=base, attr=attr):
                named = self._resolve(base)
                return self._attribute(named, attr) if named else None
            case ast.Call(func=func, args=[ast.Constant(value=str(module))]):
                called = self._resolve(func)
                if called and called.value in (importlib.import_module, __import__):
                    return self._module(module if called.value is not __import__ else module.partition(".")[0], module)
            case ast.Call(func=func, args=[base, ast.Constant(value=str(attr)), *_]):
                called = self._resolve(func)
                named = self._resolve(base) if called and called.value is getattr else None
                return self._attribute(named, attr) if named else None
        return None

    def _look_up(self, name: str) -> Named | None:
        for depth, scope in enumerate(reversed(self._scopes)):
            if scope.is_class and depth:
                continue
            if name in scope.globals:
                break
            if name in scope.imports:
                return self._imported(name, *scope.imports[name])
            if name in scope.local:
                return None
        return self._outer(name)

    def _imported(self, name: str, module: str, attr: str | None, level: int) -> Named:
        full = importlib.util.resolve_name("." * level + module, self._package) if level else module
        if attr is None:
            return self._module(full, name)
        base = self._module(full, full)
        named = self._attribute(base, attr)
        if named is None or (named.value is MISSING and importlib.util.find_spec(f"{full}.{attr}") is None):
            return Named(name, MISSING)
        return named if named.value is not MISSING else self._module(f"{full}.{attr}", name)

    def _module(self, full: str, label: str) -> Named:
        if full in sys.modules:
            return Named(label, sys.modules[full])
        if self._is_library(full):
            return Named(label, Library(full))
        try:
            return Named(label, importlib.import_module(full))
        except ModuleNotFoundError:
            return Named(label, MISSING)
        except Exception as error:  # a module may raise anything
            self._refuse(f"{full}, which it imports, cannot be imported: {error}")
            return Named(label, Library(full))

    def _attribute(self, named: Named, attr: str) -> Named | None:
        label, value = f"{named.label}.{attr}", named.value
        if isinstance(value, Library):
            return Named(label, Library(f"{value.name}.{attr}"))
        if isinstance(value, ModuleType):
            return self._of_module(label, value, attr)
        if isinstance(value, type) and not self._is_library(value.__module__):
            return _of_class(label, value, attr)
        if isinstance(value, FunctionType) and attr in vars(value) and attr != "__wrapped__":
            self._emit(named)
            return Named(label, vars(value)[attr], *_global_of(value), name_of(value), attr)
        return None

    def _of_module(self, label: str, module: ModuleType, attr: str) -> Named:
        try:
            value = getattr(module, attr)
        except Exception:  # a lazy module may raise anything
            value = sys.modules.get(f"{module.__name__}.{attr}", MISSING)
        if value is MISSING and not self._is_own(module):
            value = Library(f"{module.__name__}.{attr}")
        computes = vars(module).get("__getattr__")
        if attr not in vars(module) and computes is not None and self._is_own(module):
            self._emit(Named(f"{label} by __getattr__", computes))
            return Named(label, value)
        return Named(label, value, module.__name__, attr)

    def _is_own(self, module: ModuleType) -> bool:
        return not self._is_library(module.__name__)

    def _is_of_library(self, decorator: ast.expr) -> bool:
        """Of a library other than tpcompile, whose decorators say what they were given themselves."""
        named = self._resolve(decorator)
        name = name_of(named.value) if named else ""
        return bool(name) and self._is_library(name) and not name.startswith("tpcompile.")

    def _emit(self, named: Named) -> None:
        self.found.named.append(named)

    def _refuse(self, why: str) -> None:
        self.found.refused.append(why)

    def _change(self, node: ast.expr, attr: str = "") -> None:
        """An object is changed; an attribute of a module is a global variable."""
        while isinstance(node, ast.Subscript):
            node = node.value
        named = self._resolve(node)
        if named is None and isinstance(node, ast.Name):
            self.changed_arguments.add(node.id)
        if named is None or isinstance(named.value, _UNCHANGING):
            return
        if isinstance(named.value, ModuleType | type | FunctionType):
            self.found.rebound.add((name_of(named.value), attr))
        else:
            self.found.changed.add(id(named.value))


def name_of(value: Any) -> str:
    """`module.name` of a function, class or module; empty for other values."""
    if isinstance(value, Library):
        return value.name
    if isinstance(value, ModuleType):
        return value.__name__
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    return f"{module or 'builtins'}.{name}" if isinstance(name, str) else ""


def _of_class(label: str, owner: type, attr: str) -> Named:
    """An attribute of a class: what a static method runs, a constant; the whole class where more may run."""
    if issubclass(owner, Enum) and attr in owner.__members__:
        return Named(label, owner.__members__[attr])
    static = inspect.getattr_static(owner, attr, MISSING)
    if isinstance(static, staticmethod):
        return Named(label, static.__func__)
    is_constant = static is not MISSING and not hasattr(type(static), "__get__")
    if not is_constant and not isinstance(static, FunctionType):
        return Named(label, owner)
    return Named(label, static, *_global_of(owner), name_of(owner), attr)


def _global_of(value: Any) -> tuple[str, str]:
    """Module and name of the global variable that a class or function is part of; empty inside of a function."""
    is_local = "<locals>" in value.__qualname__
    return ("", "") if is_local else (value.__module__, value.__qualname__.partition(".")[0])


def sorted_by_label(named: Iterable[Named]) -> list[Named]:
    """Each name once for each value, in the order of the labels."""
    once = {(each.label, id(each.value)): each for each in named}
    return sorted(once.values(), key=operator.attrgetter("label"))
