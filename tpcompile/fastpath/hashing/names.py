"""Syntax tree of a function -> what it names outside of itself, what it changes there, which files it reads.

Names are resolved as Python resolves them: attributes of modules and classes to the end of the chain, imports inside of
the function, `getattr` and `import_module` with a constant. What depends on a value that is only known when the
function runs is refused.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.util
import inspect
import operator
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

from tpcompile.fastpath.hashing.effects import Effects
from tpcompile.fastpath.hashing.files_read import file_of_call, paths_of
from tpcompile.fastpath.hashing.libraries import Libraries
from tpcompile.fastpath.hashing.trees import CHANGES, Scope, changed_in, imports_of, scope_of

MISSING = object()
"""The value of a name that nothing defines."""


@dataclass(frozen=True)
class Library:
    """A module of a library that is not imported, or what it would have."""

    name: str


@dataclass(frozen=True)
class Raised:
    """An exception of the program, where it is raised."""

    name: str


raised = functools.cache(Raised)
"""The same object for each place where an exception is raised."""

UNCHANGING = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, Library)
_IMPORTS = "importlib.import_module"
_NAMESPACES = frozenset({"__globals__", "f_globals", "f_locals", "f_builtins", "__subclasses__"})
"""Attributes that have all variables of a module or function, or all classes that were made."""
_RUNS_TEXT = frozenset({
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.globals", "builtins.__import__",
})  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A name of the function that means something outside of it."""

    label: str
    """The name as it is written: `consts.EPS`."""
    value: Any
    module: str = ""
    """The module that has it, or what has it, as a global variable; empty for variables of enclosing functions."""
    name: str = ""
    attribute: str = ""
    """`module.class.name` of an attribute of a class or function; empty for others."""

    @property
    def place(self) -> str:
        """The name by which `Effects.rebound` has it where it is assigned."""
        return self.attribute or f"{self.module}.{self.name}"


class Names(ast.NodeVisitor):
    """Visit a function, the statements of a module or the body of a class; what was found is in the attributes.

    `module` are the globals, and `around` the function in which variables of functions around it are found.
    """

    def __init__(self, module: Mapping[str, Any], libraries: Libraries, around: FunctionType | None = None) -> None:
        self.effects = Effects()
        self.changed_arguments: set[str] = set()
        """Local variables that are changed in place: defaults of arguments among them are caches."""
        self.files: list[tuple[str, list[Any] | None]] = []
        """Expressions of files that it reads -> the files, None where they are computed."""
        self.refused: list[str] = []
        self._named: list[Named] = []
        self._globals, self._libraries = module, libraries
        self._cells = dict(zip(around.__code__.co_freevars, around.__closure__ or (), strict=True)) if around else {}
        self._package = module.get("__package__") or str(module.get("__name__")).rpartition(".")[0]
        self._scopes: list[Scope] = []

    @property
    def named(self) -> list[Named]:
        """Each name once for each value, in the order of the labels."""
        once = {(each.label, id(each.value)): each for each in self._named}
        return sorted(once.values(), key=operator.attrgetter("label"))

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Names:
        """The body of a function, and the arguments of its decorators: they may change what runs.

        The decorators of tpcompile say what they were given themselves.
        """
        for decorator in getattr(node, "decorator_list", []):
            is_call = isinstance(decorator, ast.Call)
            if is_call and not self._name(decorator.func).startswith("tpcompile."):
                self.statements([*decorator.args, *decorator.keywords])
        self._body(node)
        return self

    def class_body(self, node: ast.ClassDef) -> Names:
        """What the definition of a class evaluates, without its methods."""
        methods = (ast.FunctionDef, ast.AsyncFunctionDef)
        self._within(node, [inner for inner in node.body if not isinstance(inner, methods)])
        return self

    def statements(self, nodes: Iterable[ast.AST | None]) -> Names:
        """Statements of a module, or expressions, without those that are None."""
        for node in filter(None, nodes):
            self.visit(node)
        return self

    # Scopes

    def _within(self, node: ast.AST, inside: Iterable[ast.AST]) -> None:
        self._scopes.append(scope_of(node))
        self.statements(inside)
        self._scopes.pop()

    def _body(self, node: Any) -> None:
        self._within(node, [node.body] if isinstance(node, ast.Lambda) else node.body)

    def visit_FunctionDef(self, node: Any) -> None:
        """A function inside: its defaults and decorators are those of the function around it."""
        self.statements([*getattr(node, "decorator_list", []), *node.args.defaults, *node.args.kw_defaults])
        self._body(node)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class inside."""
        self.statements([*node.decorator_list, *node.bases, *node.keywords])
        self._body(node)

    def visit_ListComp(self, node: Any) -> None:
        """A comprehension: the first iterable is evaluated outside of it."""
        self.visit(node.generators[0].iter)
        self._within(node, ast.iter_child_nodes(node))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Its annotation is not evaluated where it matters."""
        self.statements([node.target, node.value])

    def visit_Import(self, node: ast.Import) -> None:
        """Modules that it imports: what it names of them may be in one that nothing else has imported yet."""
        for alias in node.names:
            self._module(alias.name, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """What it imports besides modules: of those, what is used counts."""
        for name, imported in imports_of(node).items():
            named = self._imported(name, *imported)
            if not isinstance(named.value, ModuleType):
                self._emit(named)

    # Names

    def visit(self, node: ast.AST) -> None:
        """Any node: it may change an object, as a store of an item changes the whole."""
        changed = changed_in(node, CHANGES)
        if changed is not None:
            self._change(changed, node.attr if isinstance(node, ast.Attribute) else "")
        super().visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A name by itself; one that a function assigns although it is not its own is declared global or nonlocal."""
        named = self._resolve(node)
        if named is None:
            return
        if isinstance(node.ctx, ast.Load):
            self._emit(named)
        elif self._scopes:
            self.effects.rebound.add(named.place)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A chain of attributes, to its end or to the first value that is no module or class."""
        self.effects.used.add(node.attr)
        if node.attr in _NAMESPACES:
            self.refused.append(f"it searches {ast.unparse(node)}: name what is used of it")
        named = self._resolve(node)
        if named is None:
            self.generic_visit(node)
        else:
            self._emit(named)

    def visit_Raise(self, node: ast.Raise) -> None:
        """An exception that is only raised counts by its name: it is no result. One that is named elsewhere is."""
        match node.exc:
            case ast.Call(func=function, args=arguments, keywords=keywords):
                named = self._resolve(function)
                kind = named.value if named else None
                if named and isinstance(kind, type) and issubclass(kind, BaseException):
                    self._named.append(Named(named.label, raised(name_of(kind))))
                    self.statements([*arguments, *keywords, node.cause])
                    return
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """An item."""
        if self._value(node.value) is sys.modules:
            self.refused.append("sys.modules is searched: import the module")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A call: of `getattr` and imports, of what reads files, of what runs text."""
        resolved = self._resolve(node)
        if resolved is not None:
            self._emit(resolved)
            self.effects.used.update(str(each.value) for each in node.args if isinstance(each, ast.Constant))
            self.statements(node.args[2:])
            return
        called = self._name(node.func)
        if called in _RUNS_TEXT:
            self.refused.append(f"it calls {called.removeprefix('builtins.')}(), so what it runs cannot be read")
        elif called == _IMPORTS:
            self.refused.append(f"{ast.unparse(node)} imports what is computed: name the module")
        file = file_of_call(node, called)
        if file is not None:
            assigned = ChainMap(*(scope.once for scope in reversed(self._scopes)))
            self.files.append((ast.unparse(node), paths_of(file, self._value, assigned.get)))
        self.generic_visit(node)

    def _emit(self, named: Named) -> None:
        value = named.value
        if isinstance(value, ModuleType) and not self._libraries.have(value.__name__):
            to_do = f"write `{named.label}.NAME` where it is used"
            self.refused.append(f"{named.label}, a module, is used as a value: {to_do}")
        else:
            self._named.append(named)

    def _change(self, node: ast.expr, attr: str = "") -> None:
        """An object is changed; an attribute of a module is a global variable."""
        while isinstance(node, ast.Subscript):
            node = node.value
        named = self._resolve(node)
        if isinstance(node, ast.Name) and named is None:
            self.changed_arguments.add(node.id)
        if named is None or isinstance(named.value, UNCHANGING):
            return
        if isinstance(named.value, ModuleType | type | FunctionType):
            self.effects.rebound.add(f"{name_of(named.value)}.{attr}")
        else:
            self.effects.changed.add(id(named.value))

    # Resolving

    def _resolve(self, node: ast.AST) -> Named | None:
        """What an expression means outside of the function; None where it depends on a local variable or a call."""
        match node:
            case ast.Name(id=name):
                return self._look_up(name)
            case ast.Attribute(value=base, attr=attr):
                named = self._resolve(base)
                return self._attribute(named, attr) if named else None
            case ast.Call(args=[ast.Constant(value=str(module))]):
                is_import = self._name(node.func) == _IMPORTS
                return self._module(module, module) if is_import else None
            case ast.Call(args=[base, ast.Constant(value=str(attr)), *_]):
                is_getattr = self._name(node.func) == "builtins.getattr"
                return self._resolve(ast.Attribute(base, attr)) if is_getattr else None
        return None

    def _value(self, node: ast.AST) -> Any:
        """The value of what an expression means; None where that is not known."""
        named = self._resolve(node)
        return named.value if named else None

    def _name(self, node: ast.AST) -> str:
        """`module.name` of it; empty where that is not known."""
        return name_of(self._value(node))

    def _look_up(self, name: str) -> Named | None:
        around = [scope for scope in self._scopes[:-1] if not scope.is_class]
        for scope in reversed([*around, *self._scopes[-1:]]):
            if name in scope.globals:
                break
            if name in scope.imports:
                return self._imported(name, *scope.imports[name])
            if name in scope.local:
                return None
        return self._outer(name)

    def _outer(self, name: str) -> Named:
        """The variable of an enclosing function, a global or a builtin."""
        if name in self._cells:
            cell = self._cells[name]
            is_assigned = cell != CellType()
            return Named(name, cell.cell_contents if is_assigned else MISSING, "", f"cell {id(cell)}")
        if name in self._globals:
            return Named(name, self._globals[name], str(self._globals.get("__name__", "")), name)
        return Named(name, getattr(builtins, name, MISSING), "builtins", name)

    def _imported(self, name: str, module: str, attr: str, level: int) -> Named:
        full = importlib.util.resolve_name("." * level + module, self._package)
        if not attr:
            return self._module(full, name)
        named = self._attribute(self._module(full, full), attr)
        if named is None or named.value is MISSING:
            named = self._module(f"{full}.{attr}", name)
        return named

    def _module(self, full: str, label: str) -> Named:
        value: Any = MISSING
        if full in sys.modules:
            value = sys.modules[full]
        elif self._libraries.have(full):
            value = Library(full)
        else:
            with contextlib.suppress(Exception):  # a module may raise anything; what raises is not defined here
                value = importlib.import_module(full)
        return Named(label, value)

    def _attribute(self, named: Named, attr: str) -> Named | None:
        label, owner = f"{named.label}.{attr}", named.value
        if isinstance(owner, Library):
            return Named(label, Library(f"{owner.name}.{attr}"))
        if isinstance(owner, ModuleType):
            return self._of_module(label, owner, attr)
        if isinstance(owner, type) and not self._libraries.have_class(owner):
            return _of_class(label, owner, attr)
        if isinstance(owner, FunctionType) and attr != "__wrapped__" and attr in vars(owner):
            self._emit(named)
            return _of_definition(label, vars(owner)[attr], owner, attr)
        return None

    def _of_module(self, label: str, module: ModuleType, attr: str) -> Named:
        value: Any = MISSING
        with contextlib.suppress(Exception):  # a lazy module may raise anything
            value = getattr(module, attr)
        if self._libraries.have(module.__name__):
            value = Library(f"{module.__name__}.{attr}") if value is MISSING else value
        elif attr not in vars(module) and "__getattr__" in vars(module):
            self._emit(Named(f"{label} by __getattr__", vars(module)["__getattr__"]))
        return Named(label, value, module.__name__, attr)


def name_of(value: Any) -> str:
    """`module.name` of a function, class or module; empty for other values."""
    if isinstance(value, Library):
        return value.name
    if isinstance(value, ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or "builtins"
    return f"{module}.{name}" if isinstance(name, str) else ""


def _of_class(label: str, owner: type, attr: str) -> Named:
    """An attribute of a class: what a static method runs, a constant; the whole class where more may run."""
    value = inspect.getattr_static(owner, attr, MISSING)
    if isinstance(value, staticmethod):
        value = value.__func__
    is_bound = hasattr(type(value), "__get__") and not isinstance(value, FunctionType)
    if is_bound or value is MISSING:
        return Named(label, owner)
    return _of_definition(label, value, owner, attr)


def _of_definition(label: str, value: Any, owner: Any, attr: str) -> Named:
    """An attribute of a class or function, which is part of a global variable unless it is inside of a function."""
    attribute = f"{name_of(owner)}.{attr}"
    if "<locals>" in owner.__qualname__:
        return Named(label, value, attribute=attribute)
    return Named(label, value, owner.__module__, owner.__qualname__.partition(".")[0], attribute)
