"""Launcher -> texts of all that is reached from it: functions, classes, values, files, and how they are joined."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePath
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.errors import ConfigError
from tpcompile.fastpath.hashing import definitions, values
from tpcompile.fastpath.hashing.effects import Effects, changing_attributes
from tpcompile.fastpath.hashing.files_read import content, path_text, portable
from tpcompile.fastpath.hashing.libraries import STANDARD, Libraries, roots_of, top_of
from tpcompile.fastpath.hashing.names import MISSING, Library, Named, Names, Raised, name_of
from tpcompile.fastpath.hashing.trees import body_of, definition_of, function_text, text_of
from tpcompile.fastpath.hashing.values import UntoldError
from tpcompile.torch_api import kernels as torch_kernels

_MOST_PARTS = 5_000
"""Objects that are read of one value. An object is read once for each way to it, and the ways may have no end."""


class Walk:
    """What was reached from a launcher.

    `changes` are the effects of what the launcher runs, as far as they are known: of what they change the definition
    counts, not the value, and the code that it keeps. `is_told` says that the launcher's files are declared.
    """

    def __init__(self, own: str, *, changes: Effects, is_told: bool) -> None:
        self.parts: dict[str, str] = {}
        """`module.function`, or that and a name in it -> text."""
        self.kernels: dict[str, Any] = {}
        """`module.function` -> Triton kernel, without what is around it."""
        self.ops: set[str] = set()
        self.functions: set[FunctionType] = set()
        self.libraries: set[str] = set()
        """Top-level packages that are called, without the standard library."""
        self.refused: list[str] = []
        """Why the source does not say what runs, by name."""
        self.ran: list[tuple[FunctionType, Effects]] = []
        """Functions that were followed, each with what it changes."""
        self._libraries = Libraries(own)
        self._changes, self._is_told = changes, is_told
        self._left: list[str] = []
        """Why parts of the value that is read now do not count as they are."""
        self._known: dict[int, tuple[str, Any]] = {}
        """Id of a function, class or container on the way -> its text, and itself: the id must remain its own."""
        self._followed: dict[int, Any] = {}
        """Id -> value whose code was followed; many objects of a program are reached in many ways."""
        self._num_parts = 0
        """Parts of the value that is read now that were read so far."""
        self._later: list[tuple[str, Any]] = []
        """What is registered with an op, under the key of its reference."""
        self._roots: set[str] = set()
        """Folders that the program is installed in."""

    def read(self, launcher: Any, references: Iterable[Any] = ()) -> None:
        """Follow a launcher, then what it does not run: kernels for fake tensors, plain code."""
        self._reference("launcher", Named("", launcher))
        functions = set(self.functions)
        self._read_later()
        kernels, ops = dict(self.kernels), set(self.ops)
        for reference in references:
            self._reference("reference", Named("", reference))
        self._read_later()
        # What is registered for fake tensors is not run, and what the plain code launches is not of the launcher.
        self.functions, self.kernels, self.ops = functions, kernels, ops

    def _read_later(self) -> None:
        while self._later:
            key, function = self._later.pop(0)
            self._reference(key, Named("", function))

    # Names

    def _found(self, key: str, names: Names, *, own: tuple[str, str] | None = None) -> None:
        """Follow what a tree names, without the global variable that it defines itself."""
        self.refused += [f"what {key} runs cannot be told from its source: {why}" for why in names.refused]
        for named in names.named:
            if (named.module, named.name) != own:
                self._reference(key, named)
        for expression, files in names.files:
            for file in files or ():
                self.parts[f"{key}: file {portable(str(file), self._roots)}"] = content(file)
            if files is None and not self._is_told:
                self.refused.append(
                    f"{key} reads a file whose name is computed, in `{expression}`: declare what it reads, "
                    "fast_path(..., files=('norm.cu',)), or name the file by constants and __file__"
                )

    def _reference(self, key: str, named: Named) -> None:
        """Follow what one name stands for."""
        value = named.value
        if named.module == "builtins" and value is not MISSING:
            return
        origin = definitions.origin_of(named, self._libraries)
        if origin:
            told = self._library(origin)
        elif id(value) in self._changes.changed or named.place in self._changes.rebound:
            told = self._defined(key, named, "it is changed while the program runs")
        else:
            told = self._told(key, named)
        self.parts[self._free(f"{key}: {named.label}")] = told

    def _told(self, key: str, named: Named) -> str:
        """The text of a value; where it has none, or a part of it has none, of its definition."""
        around, told = (self._left, self._num_parts), ""
        self._left, self._num_parts = [], 0
        try:
            told = self.text(named.value)
        except UntoldError as error:
            self._left.append(str(error))
        except Exception as error:  # whatever an object raises when it is looked at
            self._left.append(f"it raises {type(error).__name__}")
        left, (self._left, self._num_parts) = self._left, around
        if not left:
            return told
        return f"{told} {self._defined(key, named, next(filter(None, left), ''))}".strip()

    def _defined(self, key: str, named: Named, why: str) -> str:
        """The definition of a global variable; refused where it has none and `why` says that its value has no text.

        Code that its value keeps counts as well.
        """
        self._follow(named.value)
        definition = self._definition(named.module, named.name)
        if definition or not why:
            return definition
        what = f"what {named.label}, which {key} refers to, stands for" if named.label else f"what {key} stands for"
        self.refused.append(f"{what} cannot be told: {why}; make it a global variable of a module, or an argument")
        return "refused"

    def _definition(self, module: str, name: str) -> str:
        """The statements that define a global variable, and what they name; empty where there are none."""
        module, name, statements = definitions.defined(module, name)
        key = f"{module}.{name}, as defined"
        if not statements or key in self.parts:
            return key if statements else ""
        self.parts[key] = text_of(statements)
        value = vars(sys.modules[module]).get(name)
        for place, each in [(module, statements), *definitions.changing_elsewhere(value, self._own_modules)]:
            self.parts[f"{key} in {place}"] = text_of(each)
            self._found(key, Names(vars(sys.modules[place]), self._libraries).statements(each), own=(module, name))
        return key

    def _follow(self, value: Any) -> None:
        """Follow the code of the program that a value keeps, such as the functions in a registry.

        A function that was made inside of another is told by that one, and by the variables that it has from there.
        """
        left = [value]
        while left:
            value = left.pop()
            if id(value) in self._known or id(value) in self._followed:
                continue
            self._followed[id(value)] = value
            made = value if isinstance(value, FunctionType | type) else definitions.inner_of(value)
            if isinstance(made, FunctionType | type) and "<locals>" not in made.__qualname__:
                with contextlib.suppress(UntoldError):
                    self.text(value)
            else:
                left += reversed(values.held(value))

    # Values

    def text(self, value: Any) -> str:
        """The text of a value; what it refers to is followed. Raises UntoldError where it has none."""
        plain = values.plain_text(value)
        if plain is not None:
            return plain
        if id(value) in self._known:
            return self._known[id(value)][0]
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise UntoldError(f"it holds more than {_MOST_PARTS:,} objects")
        match value:
            case Enum():
                told = f"{self.text(type(value))}.{value.name}"
            case str():
                kind = "str" if type(value) is str else f"str of {self.text(type(value))}"
                told = f"{kind} {path_text(value, self._roots)}"
            case PurePath():
                told = f"path {path_text(value, self._roots)}"
            case tuple() | list() | deque() | set() | frozenset() | dict() | MappingProxyType():
                told = self._items(value)
            case CustomOpDef():
                told = self._custom_op(value)
            case FunctionType():
                told = self._function(value)
            case type():
                told = self._class(value)
            case ModuleType():
                if not self._libraries.have(value.__name__):
                    raise UntoldError(f"it is the module {value.__name__}: name what is used of it")
                told = self._library(value.__name__)
            case Library():
                told = self._library(value.name)
            case Raised():
                told = f"exception {value.name}"
            case staticmethod() | classmethod() | property() | functools.cached_property():
                kind = type(value).__name__
                functions = [getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")]
                with self._inside(value, kind):
                    texts = [self.text(each) for each in functions if each is not None]
                told = f"{kind} {', '.join(texts)}"
            case _:
                told = self._object(value)
        return told

    def _items(self, value: Any) -> str:
        kind = type(value)
        is_library = self._libraries.have_class(kind)
        name = kind.__name__ if is_library else self.text(kind)
        if values.is_filled_by_modules(value):
            self._left.append("")  # its own order is in its definition
        with self._inside(value, name):
            shown = values.items(value, self._part)
            shown += [] if is_library else self._attributes(value)
            return f"{name}({', '.join(shown)})"

    def _part(self, value: Any) -> str:
        """The text of a part of a value; where it has none, the definition of the whole counts as well."""
        try:
            return self.text(value)
        except UntoldError as error:
            self._left.append(str(error))
            return "as defined"

    def _object(self, value: Any) -> str:
        kind = type(value)
        launch = torch_kernels.triton_launch(value)
        if launch is not None:
            return self._kernel(value, launch)
        constant = getattr(value, "value", MISSING)
        if top_of(kind.__module__) == "triton" and kind.__name__ == "constexpr":
            return f"constexpr {self.text(constant)}"
        op = torch_kernels.op_name(value)
        if op:
            return self._op(op)
        if not self._libraries.have_class(kind):
            told = self.text(kind)
            with self._inside(value, told):
                shown = self._attributes(value)
            if hasattr(value, "__wrapped__"):
                shown.append(f"wraps {self.text(value.__wrapped__)}")
            return f"{told}({', '.join(shown)})"
        if hasattr(value, "__wrapped__"):
            return f"{name_of(kind)} {self.text(value.__wrapped__)}"
        self._library(kind.__module__)
        with self._inside(value, name_of(kind)):
            return values.library_text(value, self.text)

    def _attributes(self, value: Any) -> list[str]:
        """Texts of the state of an object, without attributes that its methods change while the program runs."""
        state = values.state_of(value)
        changed: set[str] = set()
        for base in type(value).__mro__:
            if not self._libraries.have_class(base):
                changed |= changing_attributes(base, self._changes.used) & state.keys()
        if changed:
            self._left.append(f"its attribute {min(changed)} is changed while the program runs")
        if any(isinstance(each, functools.cached_property) for _, each in inspect.getmembers_static(type(value))):
            self._left.append("")  # one may have been set, which its definition says
        return [f"{name}={self._part(each)}" for name, each in sorted(state.items()) if name not in changed]

    def _kernel(self, value: Any, launch: Mapping[str, Any]) -> str:
        function = inspect.unwrap(launch["fn"]) if isinstance(launch["fn"], FunctionType) else None
        if function is not None and self._libraries.have(function.__module__):
            return self._library(f"{function.__module__}.{function.__qualname__}")
        self._library("triton")
        if function is not None:
            launch = {**launch, "annotations": function.__annotations__}  # Triton reads them
            self.kernels[f"{function.__module__}.{function.__name__}"] = value
        with self._inside(value, "kernel"):
            parts = [f"{name}={self.text(part)}" for name, part in launch.items() if part]
            return f"kernel {', '.join(parts)}"

    def _op(self, name: str) -> str:
        made = torch_kernels.custom_op(name)
        if made is not None:
            return self.text(made)
        if torch_kernels.is_defined_in_python(name):
            raise UntoldError(
                f"it is the op {name} of torch.library.Library, which does not say what runs for it: make it with "
                "torch.library.custom_op"
            )
        self.libraries.add("torch")
        return f"op {name}"

    def _custom_op(self, op: CustomOpDef) -> str:
        name, function = torch_kernels.custom_op_name(op), torch_kernels.custom_op_function(op)
        if self._libraries.have(function.__module__):
            return self._library(f"{function.__module__}.{name}")
        self._known[id(op)] = f"op {name}", op
        self.ops.add(name)
        parts = [function, *torch_kernels.custom_op_backward(op)]
        self.parts[f"op {name}"] = ", ".join(map(self.text, parts))
        self._later += [(f"op {name}: {kind}", one) for kind, one in torch_kernels.custom_op_others(op).items()]
        return self.text(function)

    def _function(self, function: FunctionType) -> str:
        module, code = function.__globals__.get("__name__") or function.__module__, function.__code__
        if self._libraries.have(module):
            with self._inside(function, code.co_name):
                name = self._library(f"{module}.{code.co_name}")
                return " of ".join([name, *map(self.text, definitions.kept_by(function, self._libraries))])
        try:
            node = definition_of(function)
        except ConfigError as error:
            raise UntoldError(str(error)) from error
        key = self._free(f"{function.__module__}.{function.__qualname__}")
        self._known[id(function)] = f"function {key}", function
        self.parts[key] = function_text(node)
        self._roots |= roots_of(sys.modules.get(module), code.co_filename)
        self.functions.add(function)
        names = Names(function.__globals__, self._libraries, function).function(node)
        self.ran.append((function, names.effects))
        self._found(key, names)
        self._defaults(key, function, node, changed=names.changed_arguments)
        if hasattr(function, "__wrapped__"):
            self._reference(f"{key}: wraps", Named("", function.__wrapped__))
        return f"function {key}"

    def _class(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if self._libraries.have_class(kind):
            return self._library(name)
        bodies = body_of(kind)
        if not bodies:
            raise UntoldError(f"it is the class {name}, which is in no file")
        key = self._free(name)
        self._known[id(kind)] = f"class {key}", kind
        self.parts[key] = text_of(bodies)
        self._reference(key, Named("bases", (kind.__bases__, type(kind))))
        for body in bodies:
            self._found(key, Names(vars(sys.modules[kind.__module__]), self._libraries).class_body(body))
        is_global = "<locals>" not in kind.__qualname__
        variable = (kind.__module__, kind.__qualname__.partition(".")[0]) if is_global else ("", "")
        changing = changing_attributes(kind, self._changes.used)
        for label, value in values.own_attributes(kind).items():
            if label in changing or f"{name}.{label}" in self._changes.rebound:
                self._follow(value)
            else:
                self._reference(key, Named(label, value, *variable))
        return f"class {key}"

    def _defaults(self, key: str, function: FunctionType, node: Any, *, changed: set[str]) -> None:
        """Defaults of arguments; of one that is changed, a cache, and of what has no text, the expression counts."""
        for name, value, expression in values.defaults_of(function, node):
            told = ""
            if name not in changed:
                with contextlib.suppress(UntoldError):
                    told = self.text(value)
            self.parts[f"{key}: default of {name}"] = told
            if told:
                continue
            self._follow(value)
            names = Names(function.__globals__, self._libraries, function).statements([expression])
            self._found(key, names)
            for named in names.named:
                if named.value is MISSING:  # it was told when the function around it ran, which is over
                    why = f"{named.label} is a variable of the function around it"
                    self.refused.append(f"the default of {name} in {key} cannot be told: {why}")

    # What is known

    def _library(self, name: str) -> str:
        top = top_of(name)
        if top not in STANDARD:
            self.libraries.add(top)
        return f"library {name}"

    @functools.cached_property
    def _own_modules(self) -> list[str]:
        files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        return sorted(name for name, file in files.items() if file and not self._libraries.have(name))

    def _free(self, key: str) -> str:
        """`key`, marked where two functions have one name."""
        return key if key not in self.parts else self._free(f"{key}'")

    @contextmanager
    def _inside(self, value: Any, name: str) -> Iterator[None]:
        """Read a value that may contain itself."""
        self._known[id(value)] = f"the {name} around it", value
        try:
            yield
        finally:
            del self._known[id(value)]
