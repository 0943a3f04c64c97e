"""Launcher -> texts of all that is reached from it: functions, classes, values, files, and how they are joined."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.errors import ConfigError
from tpcompile.fastpath.hashing.classes import (
    body_of,
    changing_attributes,
    default_expressions,
    default_values,
    has_caches,
    held,
    own_attributes,
    state_of,
)
from tpcompile.fastpath.hashing.definitions import (
    changing_elsewhere,
    defined,
    global_of,
    inner_of,
    kept_by,
    origin_of,
    outer_of,
)
from tpcompile.fastpath.hashing.effects import method_of
from tpcompile.fastpath.hashing.libraries import roots_of, top_of
from tpcompile.fastpath.hashing.names import (
    MISSING,
    Found,
    Library,
    Named,
    Names,
    Raised,
    name_of,
    sorted_by_label,
)
from tpcompile.fastpath.hashing.paths import content
from tpcompile.fastpath.hashing.plain import (
    SEQUENCES,
    SETS,
    UntoldError,
    descriptor_text,
    is_filled_by_modules,
    items,
    library_text,
    plain_text,
)
from tpcompile.fastpath.hashing.reached import Reached
from tpcompile.fastpath.hashing.written import definition_of, function_text, text_of
from tpcompile.torch_api import kernels as torch_kernels


class Walk(Reached):
    """Follow a launcher; what is reached is kept in the attributes of `Reached`."""

    def read(self, launcher: Any, references: Iterable[Any] = ()) -> None:
        """Follow a launcher, then what it does not run: kernels for fake tensors, plain code."""
        self._reference("launcher", Named("", launcher))
        self._is_run = False
        self._read_later()
        kernels, ops = dict(self.kernels), set(self.ops)
        for reference in references:
            self._reference("reference", Named("", reference))
        self._read_later()
        self.kernels, self.ops = kernels, ops

    def _read_later(self) -> None:
        while self._later:
            key, function = self._later.pop(0)
            self._reference(key, Named("", function))

    # Values

    def text(self, value: Any) -> str:
        """The text of a value; what it refers to is followed. Raises UntoldError where it has none."""
        plain = plain_text(value)
        if plain is not None:
            return plain
        if id(value) in self._known:
            return self._known[id(value)]
        read = next(read for kinds, read in _READERS if isinstance(value, kinds))
        return read(self, value)

    def _enum(self, value: Enum) -> str:
        return f"{self.text(type(value))}.{value.name}"

    def _not_imported(self, value: Library) -> str:
        return self._library(value.name)

    def _descriptor(self, value: Any) -> str:
        with self._inside(value, type(value).__name__):
            return descriptor_text(value, self.text)

    def _string(self, value: str) -> str:
        kind = "str" if type(value) is str else f"str of {self.text(type(value))}"
        return f"{kind} {self._places.text(value)}"

    def _path(self, value: PurePath) -> str:
        return f"path {self._places.text(value)}"

    def _items(self, value: Any) -> str:
        kind = type(value)
        is_library = self._is_library_class(kind)
        name = kind.__name__ if is_library else self.text(kind)
        if is_filled_by_modules(value):
            self._left.append("")  # its own order is in its definition
        with self._inside(value, name):
            shown = items(value, self._part)
            shown += [] if is_library else self._attributes(value)
            return f"{name}({', '.join(shown)})"

    def _part(self, value: Any) -> str:
        """The text of a part of a value; where it has none, the definition of the whole counts as well."""
        try:
            return self.text(value)
        except UntoldError as error:
            self._left.append(str(error))
            return "as defined"

    def _module(self, value: ModuleType) -> str:
        if self._is_library(value.__name__):
            return self._library(value.__name__)
        raise UntoldError(f"it is the module {value.__name__}: name what is used of it")

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
        if not self._is_library_class(kind):
            return self._instance(value)
        if hasattr(value, "__wrapped__"):
            return f"{name_of(kind)} {self.text(value.__wrapped__)}"
        self._library(kind.__module__)
        with self._inside(value, name_of(kind)):
            return library_text(value, self.text)

    def _kernel(self, value: Any, launch: Mapping[str, Any]) -> str:
        function = inspect.unwrap(launch["fn"]) if isinstance(launch["fn"], FunctionType) else None
        if function is not None and self._is_library(function.__module__):
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
        name = torch_kernels.custom_op_name(op)
        function = torch_kernels.custom_op_function(op)
        if self._is_library(function.__module__):
            return self._library(f"{function.__module__}.{name}")
        if id(op) not in self._known:
            self._remember(op, f"op {name}")
            self.ops.add(name)
            parts = [function, *torch_kernels.custom_op_backward(op)]
            self.parts[f"op {name}"] = ", ".join(map(self.text, parts))
            others = torch_kernels.custom_op_others(op)
            self._later += [(f"op {name}: {kind}", other) for kind, other in others.items()]
        return self.text(function)

    # Functions

    def _function(self, function: FunctionType) -> str:
        module = function.__globals__.get("__name__") or function.__module__
        if self._is_library(module):
            with self._inside(function, function.__code__.co_name):
                name = self._library(f"{module}.{function.__code__.co_name}")
                return " of ".join([name, *map(self.text, kept_by(function, self._is_library))])
        try:
            node = definition_of(function)
        except ConfigError as error:
            raise UntoldError(str(error)) from error
        key = self._free(f"{function.__module__}.{function.__qualname__}")
        self._remember(function, f"function {key}")
        self.parts[key] = function_text(node)
        self._places.roots.update(roots_of(sys.modules.get(module), function.__code__.co_filename))
        if self._is_run:
            self.functions.add(function)
        names = self._names(outer_of(function), function.__globals__)
        found = names.function(node)
        self._ran.append((method_of(function), found))
        self._found(key, found)
        self._defaults(key, function, node, changed=names.changed_arguments)
        if hasattr(function, "__wrapped__"):
            self._reference(f"{key}: wraps", Named("", function.__wrapped__))
        return f"function {key}"

    def _defaults(self, key: str, function: FunctionType, node: Any, *, changed: set[str]) -> None:
        """Defaults of arguments; of one that is changed, a cache, and of what has no text, the expression counts."""
        expressions = default_expressions(node)
        for name, value in default_values(function).items():
            what = f"default of {name}"
            told = ""
            with contextlib.suppress(UntoldError):
                told = "" if name in changed else self.text(value)
            self.parts[f"{key}: {what}"] = told
            if told:
                continue
            self._follow(value)
            found = self._names(outer_of(function), function.__globals__).statements([expressions[name]])
            self._found(key, found)
            for named in found.named:
                if named.value is MISSING:
                    why = f"{named.label} is a variable of the function around it"  # which is over
                    self.refused.append(f"the {what} in {key} cannot be told: {why}")

    def _names(self, outer: Callable[[str], Named], module: Mapping[str, Any]) -> Names:
        package = module.get("__package__") or str(module.get("__name__")).rpartition(".")[0]
        return Names(outer, is_library=self._is_library, package=package)

    def _found(self, key: str, found: Found) -> None:
        """What a tree names."""
        self.refused += [f"what {key} runs cannot be told from its source: {why}" for why in found.refused]
        for named in sorted_by_label(found.named):
            self._reference(key, named)
        for expression, files in found.files:
            for file in files or ():
                self.parts[f"{key}: file {self._places.portable(str(file))}"] = content(file)
            if files is None and not self._is_told:
                self.refused.append(
                    f"{key} reads a file whose name is computed, in `{expression}`: declare what it reads, "
                    "fast_path(..., files=('norm.cu',)), or name the file by constants and __file__"
                )

    def _reference(self, key: str, named: Named) -> None:
        """What one name stands for."""
        value = named.value
        if named.module == "builtins" and value is not MISSING:
            return
        origin = origin_of(named, self._is_library)
        if origin:
            told = self._library(origin)
        elif isinstance(value, Raised):
            told = f"exception {value.name}"
        elif id(value) in self._effects.changed or named.place in self._effects.rebound:
            told = self._defined(key, named, "it is changed while the program runs")
        else:
            told = self._told(key, named)
        self.parts[self._free(f"{key}: {named.label}")] = told

    def _told(self, key: str, named: Named) -> str:
        """The text of a value; where it has none, or a part of it has none, of its definition."""
        around, self._left, told = self._left, [], ""
        try:
            told = self.text(named.value)
        except UntoldError as error:
            self._left.append(str(error))
        except Exception as error:  # whatever an object raises when it is looked at
            self._left.append(f"it raises {type(error).__name__}")
        left, self._left = self._left, around
        why = next(filter(None, left), "")
        return f"{told} {self._defined(key, named, why)}".strip() if left else told

    def _defined(self, key: str, named: Named, why: str) -> str:
        """The definition of a global variable; refused where it has none and `why` says that its value has no text.

        Code that its value keeps counts as well.
        """
        self._follow(named.value)
        definition = self._definition(named.module, named.name)
        if definition or not why:
            return definition
        what = f"{named.label}, which {key} refers to," if named.label else key
        to_do = "make it a global variable of a module, or an argument"
        self.refused.append(f"what {what} stands for cannot be told: {why}; {to_do}")
        return "refused"

    def _definition(self, module: str, name: str) -> str:
        """The statements that define a global variable, and what they name; empty where there are none."""
        module, name, statements = defined(module, name)
        key = f"{module}.{name}, as defined"
        if not statements or key in self.parts:
            return key if statements else ""
        self.parts[key] = text_of(statements)
        namespace = vars(sys.modules[module])
        everywhere = [(module, statements), *changing_elsewhere(namespace.get(name), self._own_modules)]
        for place, each in everywhere:
            self.parts[f"{key} in {place}"] = text_of(each)
            namespace = vars(sys.modules[place])
            found = self._names(global_of(namespace), namespace).statements(each)
            found.named = [named for named in found.named if (named.module, named.name) != (module, name)]
            self._found(key, found)
        return key

    def _follow(self, value: Any) -> None:
        """Follow code of the program that a value keeps which changes: what a registry was filled with.

        What a function made is told by that function, and what it has it from.
        """
        inner = inner_of(value)
        made = value if isinstance(value, FunctionType | type) or inner is None else inner
        if id(value) in self._known:
            return
        is_code = isinstance(made, FunctionType | type)
        if is_code and "<locals>" not in made.__qualname__:
            with contextlib.suppress(UntoldError):
                self.text(value)
            return
        with self._inside(value, "value"):
            for each in held(value):
                self._follow(each)

    # Classes

    def _class(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if self._is_library_class(kind):
            return self._library(name)
        bodies = body_of(kind)
        if not bodies:
            raise UntoldError(f"it is the class {name}, which is in no file")
        key = self._free(name)
        self._remember(kind, f"class {key}")
        self.parts[key] = text_of(bodies)
        self._reference(key, Named("bases", (kind.__bases__, type(kind))))
        namespace = vars(sys.modules[kind.__module__])
        for body in bodies:
            self._found(key, self._names(global_of(namespace), namespace).class_body(body))
        is_global = "<locals>" not in kind.__qualname__
        variable = (kind.__module__, kind.__qualname__.partition(".")[0]) if is_global else ("", "")
        changing = changing_attributes(kind, self._effects.used)
        for label, value in own_attributes(kind).items():
            is_changed = label in changing or f"{name}.{label}" in self._effects.rebound
            if is_changed:
                self._follow(value)
            else:
                self._reference(key, Named(label, value, *variable))
        return f"class {key}"

    def _instance(self, value: Any) -> str:
        kind = type(value)
        told = self.text(kind)
        with self._inside(value, told):
            shown = self._attributes(value)
        if hasattr(value, "__wrapped__"):
            shown.append(f"wraps {self.text(value.__wrapped__)}")
        return f"{told}({', '.join(shown)})"

    def _attributes(self, value: Any) -> list[str]:
        """Texts of the state of an object, without attributes that its methods change while the program runs."""
        state = state_of(value)
        changed: set[str] = set()
        for base in type(value).__mro__:
            if not self._is_library_class(base):
                changed |= changing_attributes(base, self._effects.used) & state.keys()
        if changed:
            self._left.append(f"its attribute {min(changed)} is changed while the program runs")
        if has_caches(type(value)):
            self._left.append("")  # one may have been set, which its definition says
        return [f"{name}={self._part(each)}" for name, each in sorted(state.items()) if name not in changed]


_READERS: list[tuple[Any, Callable[[Walk, Any], str]]] = [
    (Enum, Walk._enum),
    (str, Walk._string),
    (PurePath, Walk._path),
    ((*SEQUENCES, *SETS, dict, MappingProxyType), Walk._items),
    (CustomOpDef, Walk._custom_op),
    (FunctionType, Walk._function),
    (type, Walk._class),
    (ModuleType, Walk._module),
    (Library, Walk._not_imported),
    ((staticmethod, classmethod, property, functools.cached_property), Walk._descriptor),
    (object, Walk._object),
]
"""Kinds of values, in the order in which they are asked for."""
