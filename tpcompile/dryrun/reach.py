"""What the calls of a target can reach on this rank -> one hash: equal hashes, equal starts of the calls.

Walked are the program, its inputs and step, the globals of all of the user's modules, and from there attributes,
items, closures, defaults, classes and the globals that a function names: of a tensor its metadata and, where it has
any, its values, of a process group or mesh its axis and size. Code of installed packages counts by its place; of their
modules only what some function that was reached names is seen, no deeper.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import gc
import hashlib
import io
import logging
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.evidence.text.lines import is_library_file
from tpcompile.target import Target
from tpcompile.torch_api.compiler import compile_config, environment

_MAX_OBJECTS = 1_000_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, type(Ellipsis), range, slice)
_BY_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo)
_BY_TYPE = (
    io.IOBase, threading.local, type(threading.Lock()), type(threading.RLock()), types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, logging.Handler,
)  # fmt: skip
"""What decides nothing that is compiled: files, locks, descriptors of C."""
_OF_MODULE = frozenset({"__builtins__", "__cached__", "__file__", "__loader__", "__spec__", "__package__", "__path__"})
_OF_CLASS = frozenset({"__dict__", "__weakref__", "__doc__", "__module__"})
_TORCH_OPS = "torch._ops"


class CannotTellError(Exception):
    """Something was reached whose state is not visible; its type."""


def state_of(target: Target, roles: Mapping[str, str], modules: Iterable[str]) -> str:
    """The hash of what the calls of the target start from.

    `roles` are those of the process groups, by name, `modules` the names of the user's modules. Raises CannotTellError.
    """
    walk = _Walk(roles)
    walk.see(sorted(environment().items()), sorted(compile_config().items()), _of_torch())
    walk.see(target.program, target.inputs, target.resized, target.step, target.axis)
    for name in modules:
        held = vars(sys.modules[name])
        walk.see(name, [(key, value) for key, value in held.items() if key not in _OF_MODULE])
    return walk.digest()


def _of_torch() -> list[Any]:
    return [
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), _default_device(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
    ]  # fmt: skip


def _default_device() -> str:
    try:
        return str(torch.get_default_device())
    except (AssertionError, RuntimeError):  # of a GPU that is not here, torch makes a tensor to know which
        return "a GPU"


@functools.lru_cache(maxsize=4096)
def _is_packages(file: str) -> bool:
    return "/site-packages/" in file or "/dist-packages/" in file or is_library_file(file)


class _Walk:
    """A depth-first walk without recursion: models are deeper than Python's stack."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        self._roles = roles
        self._hash = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        """Id of an object -> its number: a second time only that is written, so that aliases count."""
        self._kept: list[Any] = []
        """Numbered objects, which must not be freed: a new one would get their id."""
        self._storages: dict[int, int] = {}
        self._waiting: list[Any] = []

    def digest(self) -> str:
        """The hash of all that was seen."""
        return self._hash.hexdigest()

    def see(self, *values: Any) -> None:
        """Walk these, in order."""
        self._waiting.append(values)
        while self._waiting:
            self._visit(self._waiting.pop())

    def _text(self, *texts: object) -> None:
        for text in texts:
            self._hash.update(f"{text}\0".encode(errors="surrogatepass"))

    def _then(self, values: Iterable[Any]) -> None:
        found = list(values)
        self._text(len(found))
        self._waiting.extend(reversed(found))

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._text(kind.__name__, repr(value))
            return
        number = len(self._numbers)
        known = self._numbers.setdefault(id(value), number)
        if known < number:
            self._text("seen", known)
            return
        self._kept.append(value)
        if number > _MAX_OBJECTS:
            raise CannotTellError(f"more than {_MAX_OBJECTS:,} objects")
        self._text(kind.__module__, kind.__qualname__)
        handler = _Walk._by_text if kind.__module__ == _TORCH_OPS else self._handler(value)
        if handler is not None:
            handler(self, value)
        elif not isinstance(value, _BY_TYPE):
            # Any other object: its class, attributes and slots; one with a state in C as it would be pickled.
            held = list(_attributes(value)) if _is_of_python(kind) else [_pickled(value)]
            self._then([kind, *held])

    def _handler(self, value: Any) -> Callable[[_Walk, Any], None] | None:
        for kind, handler in _HANDLERS:
            if isinstance(value, kind):
                return handler
        return None

    # How each kind of value is walked.

    def _by_text(self, value: Any) -> None:
        self._text(value)

    def _class(self, value: type) -> None:
        """A class by its place and what its functions name; a user's class with all that is in it."""
        self._text(value.__module__, value.__qualname__)
        if value.__module__ == "builtins":
            return
        is_users = not _is_packages(getattr(sys.modules.get(value.__module__), "__file__", None) or "/site-packages/")
        for name, member in list(vars(value).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                self._text(name, _of_code(function.__code__))
                self._named(function)
        members = [pair for pair in vars(value).items() if pair[0] not in _OF_CLASS] if is_users else []
        self._then([*value.__bases__, *members])

    def _function(self, value: types.FunctionType) -> None:
        self._text(value.__qualname__, _of_code(value.__code__))
        self._named(value)
        cells = [_content(cell) for cell in value.__closure__ or ()]
        is_users = not _is_packages(value.__code__.co_filename)
        # The globals that a user's function names are walked: it may not be in a module that was imported.
        names = [name for name in _names(value.__code__) if name in value.__globals__] if is_users else []
        users = [value.__globals__[name] for name in names]
        self._then([*cells, value.__defaults__, value.__kwdefaults__, value.__dict__, *users])

    def _named(self, function: types.FunctionType) -> None:
        """What a function names in its module, and in the modules that it names there: functions by their place."""
        names = _names(function.__code__)
        for name in names:
            value = function.__globals__.get(name)
            self._shallow(name, value)
            if isinstance(value, types.ModuleType):
                for inner in names:
                    self._shallow(inner, vars(value).get(inner))

    def _shallow(self, name: str, value: Any) -> None:
        if value is None:
            return
        self._text(name, type(value).__qualname__)
        if type(value) in _PLAIN:
            self._text(repr(value))
        elif isinstance(value, types.FunctionType):
            self._text(_of_code(value.__code__))
        elif isinstance(value, type):
            self._text(value.__qualname__)

    def _builtin(self, value: types.BuiltinFunctionType) -> None:
        self._text(value.__qualname__)
        self._then([] if value.__self__ is None else [value.__self__])

    def _mesh(self, value: DeviceMesh) -> None:
        names = value.mesh_dim_names or ()
        groups = [value.get_group(index) for index in range(value.ndim)]
        self._text(value.device_type, names, tuple(value.shape))
        self._then(groups)

    def _tensor(self, value: Tensor) -> None:
        self._text(value.dtype, tuple(value.shape), value.device, value.layout, value.requires_grad, value.is_leaf)
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            self._then([value.__dict__, value._backward_hooks, context, *(getattr(value, name) for name in names)])
            return
        if value.layout is torch.strided:
            storage = value.untyped_storage()
            self._kept.append(storage)
            number = self._storages.setdefault(storage._cdata, len(self._storages))  # one for all that share it
            self._text(value.stride(), value.storage_offset(), number)
        if value.device.type == "cpu" and value.layout is torch.strided:
            self._text(_of_values(value))
        self._then([value.__dict__, value._backward_hooks, value.grad if value.is_leaf else None])


def _is_of_python(kind: type) -> bool:
    """True for a class whose objects hold attributes and slots alone: with a state in C they would be larger."""
    num_slots = sum(len(_slots(one)) for one in kind.__mro__)
    num_pointers = num_slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ == object.__basicsize__ + num_pointers * _POINTER


_POINTER = struct.calcsize("P")


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _attributes(value: Any) -> Iterator[Any]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from held.items()
    for kind in type(value).__mro__:
        for name in _slots(kind):
            yield name, getattr(value, name, None)


def _pickled(value: Any) -> Any:
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception as error:  # of any kind: the class decides
        raise CannotTellError(f"{type(value).__module__}.{type(value).__qualname__}") from error
    return reduced[1:3] if isinstance(reduced, tuple) else reduced


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _of_values(value: Tensor) -> str:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=65536)
def _of_code(code: types.CodeType) -> str:
    """A function of an installed package by its place, a user's by its code."""
    place = f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
    if _is_packages(code.co_filename):
        return place
    consts = [_of_code(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return f"{place} {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {consts}"


@functools.lru_cache(maxsize=65536)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes in a function and those inside it."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names(one)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


_HANDLERS: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (Tensor, _Walk._tensor),
    (types.FunctionType, _Walk._function),
    (types.MethodType, lambda walk, value: walk._then([value.__func__, value.__self__])),
    (types.BuiltinFunctionType, _Walk._builtin),
    (types.ModuleType, lambda walk, value: walk._text(value.__name__)),
    (enum.Enum, lambda walk, value: walk._text(value.name)),
    (type, _Walk._class),
    (_BY_TEXT, _Walk._by_text),
    (dist.ProcessGroup, lambda walk, value: walk._text(walk._roles.get(value.group_name, "?"), value.size())),
    (DeviceMesh, _Walk._mesh),
    (torch.Generator, lambda walk, value: walk._text(value.device, _of_values(value.get_state()))),
    (logging.Logger, lambda walk, value: walk._text(value.name, value.level, value.disabled)),
    (
        (staticmethod, classmethod, property, functools.cached_property),
        lambda walk, value: walk._then([getattr(value, name, None) for name in ("__func__", "fget", "fset", "func")]),
    ),
    # Such a function, and what it has kept.
    (functools._lru_cache_wrapper, lambda walk, value: walk._then([value.__wrapped__, *gc.get_referents(value)])),
    (weakref.ref, lambda walk, value: walk._then([value()])),
    (
        (dict, types.MappingProxyType),
        lambda walk, value: walk._then([*value.keys(), *value.values(), *_attributes(value)]),
    ),
    ((list, tuple, set, frozenset), lambda walk, value: walk._then([*value, *_attributes(value)])),
)
