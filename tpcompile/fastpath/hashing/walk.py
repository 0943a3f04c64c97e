"""Launcher -> texts of all that is reached from it: functions, classes, values, files, and how they are joined."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import (
    FunctionType,
    MappingProxyType,
    ModuleType,
)
from typing import Any

from torch.library import CustomOpDef

from tpcompile.errors import ConfigError
from tpcompile.fastpath.hashing.classes import (
    body_of,
    changing_attributes,
    default_expressions,
    default_values,
    is_generated,
    own_attributes,
    state_of,
)
from tpcompile.fastpath.hashing.definitions import defined, global_of, kept_by, origin_of, outer_of
from tpcompile.fastpath.hashing.libraries import is_library, is_standard, roots_of, top_of
from tpcompile.fastpath.hashing.names import MISSING, Found, Named, Names, name_of, sorted_by_label
from tpcompile.fastpath.hashing.paths import Places, content
from tpcompile.fastpath.hashing.plain import (
    CACHES,
    JOINED,
    SEQUENCES,
    SETS,
    NoSourceError,
    UntoldError,
    items,
    library_text,
    plain_text,
)
from tpcompile.fastpath.hashing.written import definition_of, function_text, text_of
from tpcompile.torch_api import kernels as torch_kernels


class Walk:
    """What was reached so far.

    `changed` and `rebound` are the ids of objects and the names of globals that the program changes while it runs: of
    those the definition counts, not the value. `is_told` says that the launcher's files are declared.
    """

    def __init__(self, own: str, *, changed: Iterable[int], rebound: Iterable[tuple[str, str]], is_told: bool) -> None:
        self.parts: dict[str, str] = {}
        """`module.function`, or that and a name in it -> text."""
        self.kernels: dict[str, Any] = {}
        """`module.function` -> Triton kernel, without what is around it."""
        self.ops: set[str] = set()
        self.functions: set[FunctionType] = set()
        self.libraries: set[str] = set()
        self.refused: list[str] = []
        """Why the source does not say what runs, by name."""
        self.changed, self.rebound = set(changed), set(rebound)
        self._own, self._is_told = own, is_told
        self._known: dict[int, str] = {}
        """Id of a function, class or container on the way -> its text."""
        self._kept: list[Any] = []
        """Objects of those ids."""
        self._later: list[tuple[str, Any]] = []
        self._places = Places()
        self._is_run = True

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
        if isinstance(value, Enum):
            return f"{self.text(type(value))}.{value.name}"
        plain = plain_text(value)
        if plain is not None:
            return plain
        if id(value) in self._known:
            return self._known[id(value)]
        for kinds, read in _READERS:
            if isinstance(value, kinds):
                return read(self, value)
        for kinds, joined in JOINED:
            if isinstance(value, kinds):
                with _Inside(self, value, type(value).__name__):
                    return joined(value, self.text)
        return self._object(value)

    def _library(self, name: str) -> str:
        top = top_of(name)
        if not is_standard(top):
            self.libraries.add(top)
        return f"library {name}"

    def _is_library(self, module: str) -> bool:
        return is_library(module or "", self._own)

    def _string(self, value: str) -> str:
        kind = "str" if type(value) is str else f"str of {self.text(type(value))}"
        return f"{kind} {self._places.text(value)}"

    def _path(self, value: PurePath) -> str:
        return f"path {self._places.text(value)}"

    def _items(self, value: Any) -> str:
        kind = type(value)
        name = kind.__name__ if self._is_library(kind.__module__) else self.text(kind)
        with _Inside(self, value, name):
            return f"{name}({', '.join(items(value, self.text))})"

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
        if not self._is_library(kind.__module__):
            return self._instance(value)
        if hasattr(value, "__wrapped__"):
            return f"{name_of(kind)} {self.text(value.__wrapped__)}"
        self._library(kind.__module__)
        with _Inside(self, value, name_of(kind)):
            return library_text(value, self.text)

    def _kernel(self, value: Any, launch: Mapping[str, Any]) -> str:
        function = inspect.unwrap(launch["fn"]) if isinstance(launch["fn"], FunctionType) else None
        if function is not None and self._is_library(function.__module__):
            return self._library(f"{function.__module__}.{function.__qualname__}")
        self._library("triton")
        if function is not None:
            launch = {**launch, "annotations": function.__annotations__}  # Triton reads them
            self.kernels[f"{function.__module__}.{function.__name__}"] = value
        with _Inside(self, value, "kernel"):
            return f"kernel {', '.join(f'{name}={self.text(part)}' for name, part in launch.items() if part)}"

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
            with _Inside(self, function, function.__code__.co_name):
                name = self._library(f"{module}.{function.__code__.co_name}")
                return " of ".join([name, *map(self.text, kept_by(function, self._is_library))])
        try:
            node = definition_of(function)
        except ConfigError as error:
            raise NoSourceError(str(error)) from error
        key = self._free(f"{function.__module__}.{function.__qualname__}")
        self._remember(function, f"function {key}")
        self.parts[key] = function_text(node)
        self._places.roots.update(roots_of(sys.modules.get(module), function.__code__.co_filename))
        if self._is_run:
            self.functions.add(function)
        names = self._names(outer_of(function), function.__globals__)
        self._found(key, names.function(node))
        self._defaults(key, function, node, names.changed_arguments)
        if hasattr(function, "__wrapped__"):
            self._reference(f"{key}: wraps", Named("", function.__wrapped__))
        return f"function {key}"

    def _defaults(self, key: str, function: FunctionType, node: Any, changed: set[str]) -> None:
        """Defaults of arguments; of a cache, and of what has no text, the expression counts."""
        expressions = default_expressions(node)
        for name, value in default_values(function).items():
            what = f"default of {name}"
            is_cache = name in changed and isinstance(value, CACHES)
            told = "" if is_cache else self._default(key, what, value)
            if not told:
                found = self._names(outer_of(function), function.__globals__).statements([expressions[name]])
                self._found(key, found)
                self._refuse_missing(f"the {what} in {key}", found)
            self.parts[f"{key}: {what}"] = told

    def _default(self, key: str, what: str, value: Any) -> str:
        """The text of a default; empty where its expression counts."""
        try:
            return self.text(value)
        except NoSourceError as error:
            self._refuse(key, Named(f"the {what}", value), str(error))
            return "refused"
        except UntoldError:
            return ""

    def _refuse_missing(self, what: str, found: Found) -> None:
        """Names of the function around it, which is over."""
        missing = [named.label for named in found.named if named.value is MISSING]
        self.refused += [f"{what} cannot be told: {label} is a variable of the function around it" for label in missing]

    def _names(self, outer: Callable[[str], Named], module: Mapping[str, Any]) -> Names:
        package = module.get("__package__") or str(module.get("__name__")).rpartition(".")[0]
        return Names(outer, is_library=self._is_library, package=package)

    def _found(self, key: str, found: Found) -> None:
        """What a tree names."""
        self.changed |= found.changed
        self.rebound |= found.rebound
        self.refused += [f"what {key} runs cannot be told from its source: {why}" for why in found.refused]
        for named in sorted_by_label(found.named):
            self._reference(key, named)
        for expression, files in found.files:
            if files is None and not self._is_told:
                self.refused.append(
                    f"{key} reads a file whose name is computed, in `{expression}`: declare what it reads, "
                    "fast_path(..., files=('norm.cu',)), or name the file by constants and __file__"
                )
            for file in files or ():
                self.parts[f"{key}: file {self._places.portable(str(file))}"] = content(file)

    def _reference(self, key: str, named: Named) -> None:
        """What one name stands for."""
        value = named.value
        if named.module == "builtins" and value is not MISSING:
            return
        origin = origin_of(named, self._is_library)
        if origin:
            told = self._library(origin)
        elif id(value) in self.changed or self._is_rebound(named):
            told = self._defined(key, named, "it is changed while the program runs")
        else:
            told = self._told(key, named)
        self.parts[self._free(f"{key}: {named.label}")] = told

    def _told(self, key: str, named: Named) -> str:
        """The text of a value; where it has none, of its definition."""
        try:
            return self.text(named.value)
        except NoSourceError as error:
            self._refuse(key, named, str(error))
        except UntoldError as error:
            return self._defined(key, named, f"{error}")
        except Exception as error:  # whatever an object raises when it is looked at
            return self._defined(key, named, f"it raises {type(error).__name__}")
        return "refused"

    def _defined(self, key: str, named: Named, why: str) -> str:
        """The definition of a global variable; refused where it has none."""
        definition = self._definition(named.module, named.name)
        if not definition:
            self._refuse(key, named, f"{why}; make it a global variable of a module, or an argument")
        return definition or "refused"

    def _refuse(self, key: str, named: Named, why: str) -> None:
        what = f"{named.label}, which {key} refers to," if named.label else key
        self.refused.append(f"what {what} stands for cannot be told: {why}")

    def _is_rebound(self, named: Named) -> bool:
        if named.owner:
            return (named.owner, named.attr) in self.rebound
        return (named.module, named.name) in self.rebound

    def _definition(self, module: str, name: str) -> str:
        """The statements that define a global variable, and what they name; empty where there are none."""
        module, name, statements = defined(module, name)
        key = f"{module}.{name}, as defined"
        if not statements or key in self.parts:
            return key if statements else ""
        self.parts[key] = text_of(statements)
        namespace = vars(sys.modules[module])
        found = self._names(global_of(namespace), namespace).statements(statements)
        found.named = [each for each in found.named if (each.module, each.name) != (module, name)]
        self._found(key, found)
        return key

    # Classes

    def _class(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if self._is_library(kind.__module__):
            return self._library(name)
        if issubclass(kind, BaseException):
            return f"exception {name}"  # what is raised is no result
        key = self._free(name)
        self._remember(kind, f"class {key}")
        bodies = body_of(kind)
        self.parts[key] = text_of(bodies)
        self._reference(key, Named("bases", (kind.__bases__, type(kind))))
        module = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
        if bodies and module:
            names = self._names(global_of(module), module)
            for body in bodies:
                self._found(key, names.class_body(body))
        changing = changing_attributes(kind) | {attr for owner, attr in self.rebound if owner == name}
        for label, value in own_attributes(kind, are_written=bool(bodies)):
            if label not in changing and not is_generated(kind, value):
                is_global = bool(bodies) and "<locals>" not in kind.__qualname__
                module_name = kind.__module__ if is_global else ""
                self._reference(key, Named(label, value, module_name, kind.__qualname__.partition(".")[0]))
        return f"class {key}"

    def _instance(self, value: Any) -> str:
        kind = type(value)
        told = self.text(kind)
        own = [base for base in kind.__mro__ if not self._is_library(base.__module__)]
        changing = set().union(*map(changing_attributes, own))
        with _Inside(self, value, told):
            state = state_of(value)
            for name in state:
                if name in changing:
                    raise UntoldError(f"its attribute {name} is changed while the program runs")
            shown = [f"{name}={self.text(each)}" for name, each in sorted(state.items())]
        if hasattr(value, "__wrapped__"):
            shown.append(f"wraps {self.text(value.__wrapped__)}")
        return f"{told}({', '.join(shown)})"

    def _remember(self, value: Any, text: str) -> None:
        self._known[id(value)] = text
        self._kept.append(value)

    def _free(self, key: str) -> str:
        """`key`, marked where two functions have one name."""
        return key if key not in self.parts else self._free(f"{key}'")

    def enter(self, value: Any, name: str) -> None:
        """Begin a value that may contain itself."""
        self._remember(value, f"the {name} around it")

    def leave(self, value: Any) -> None:
        """End it."""
        del self._known[id(value)]


class _Inside:
    def __init__(self, walk: Walk, value: Any, name: str) -> None:
        self._walk, self._value, self._name = walk, value, name

    def __enter__(self) -> None:
        self._walk.enter(self._value, self._name)

    def __exit__(self, *_: object) -> None:
        self._walk.leave(self._value)


_READERS: list[tuple[Any, Callable[[Walk, Any], str]]] = [
    (str, Walk._string),
    (PurePath, Walk._path),
    ((*SEQUENCES, *SETS, dict, MappingProxyType), Walk._items),
    (CustomOpDef, Walk._custom_op),
    (FunctionType, Walk._function),
    (type, Walk._class),
    (ModuleType, Walk._module),
]
"""Kinds of values, in the order in which they are asked for."""
