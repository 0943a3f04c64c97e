"""Name of an op -> the files that registered it and its kernels; private names, seen on torch 2.11.0 and 2.13.0.

    name                                       why
    _C._dispatch_dump                          file and line of each registration, in C++ and in Python
    _C._dispatch_get_all_op_names              all ops, with their overloads
    library.Library.impl                       what registers a kernel in Python, given its function
    _C._jit_get_schemas_for_operator           ops of TorchScript, which the dispatcher does not have
    _library.custom_ops.OPDEFS                 the functions of a custom op, whose registrations all name torch's file
    _library.simple_registry                   file and line of a fake kernel
    _ops._higher_order_ops                     all higher-order ops by name
    OpOverload.py_kernels                      kernels that Python registered with `py_impl`

`tests/torch_api/test_registrations.py` fails when one of them moves.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._library import simple_registry as _simple_registry

from tpcompile.torch_api import kernels, makers

_REGISTERED = re.compile(
    r"^(?P<what>[^:\n]+?)(?P<replaced> \(inactive\))?: registered at (?P<file>.+?):(?P<line>\d+)(?: :: .*)?$",
    re.MULTILINE,
)
_TORCH = str(Path(torch.__file__).parent) + "/"
_FOR_OTHERS = (f"{_TORCH}library.py", f"{_TORCH}_library/", f"{_TORCH}_custom_op/", f"{_TORCH}_custom_ops.py")
"""Files of torch that register what their caller asks for."""
_ANCHOR = "build/aten/src/ATen/RegisterSchema.cpp"
"""The file that registers the schemas of aten: the path that torch noted for it begins with where torch was built."""
_LEFT_OUT = re.compile(r"^Meta|^Python|PrivateUse")
"""Dispatch keys whose kernels compute shapes, which a tensor subclass must ask for, or of a device that torch has no
kernels for: all of them come with the device's own library."""
_CALLERS_IN_TORCH = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "ao", "debugprims", "device_mesh",
    "inductor_prims", "pippy",
})  # fmt: skip
"""Namespaces in which torch's own modules call `torch.library.define`, `impl` or `register_autograd`, which keep no
caller."""
_KEYS_BY_TORCH = frozenset({"Autograd[alias]", "BackendSelect", "CompositeExplicitAutograd[alias]"})
"""The dispatch keys of those calls. A kernel that replaces one of them is recognised: torch lists the replaced one."""

_functions: dict[tuple[str, str], Any] = {}
"""(op, dispatch key) -> the function of its kernel, of registrations that were watched."""


@dataclass(frozen=True)
class Place:
    """File and line of a registration, as torch noted it."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Registered:
    """What the dispatcher knows of one overload of an op."""

    name: str
    """`namespace::op`, or `namespace::op.overload`."""
    schema: Place | None = None
    """None for an op that the dispatcher does not have."""
    kernels: dict[str, Place] = field(default_factory=dict)
    """Dispatch key -> where the kernel in force was registered."""
    replaced: frozenset[str] = frozenset()
    """Dispatch keys under which an earlier kernel was replaced."""


def registered(name: str) -> Registered:
    """Who registered an overload of an op, by its whole name; an empty record where that is no name of an op."""
    if "::" not in name:  # torch 2.11 raises
        return Registered(name)
    schema, found, replaced = None, {}, set()
    for line in _REGISTERED.finditer(torch._C._dispatch_dump(name)):
        key, place = line["what"], Place(line["file"], int(line["line"]))
        if key == "debug":
            schema = place
        elif line["replaced"]:
            replaced.add(key)
        else:
            watched = _functions.get((name, key.removesuffix("[alias]")))
            # Where torch noted only itself, the function of the kernel shows who registered it.
            found[key] = place_of(watched) if watched is not None and registers_for_others(place) else place
    return Registered(name, schema, found, frozenset(replaced))


@contextmanager
def functions_noted() -> Iterator[None]:
    """Note the functions of kernels that Python registers inside: torch does not know the caller of `Library.impl`."""
    original = torch.library.Library.impl

    @functools.wraps(original)
    def impl(library: Any, op: Any, function: Any, dispatch_key: str = "", **options: Any) -> Any:
        result = original(library, op, function, dispatch_key, **options)
        name = (op if isinstance(op, str) else op.name()).rpartition("::")[2]
        _functions[f"{library.ns}::{name}", dispatch_key or library.dispatch_key] = function
        return result

    torch.library.Library.impl = impl  # type: ignore[method-assign]
    try:
        yield
    finally:
        if torch.library.Library.impl is impl:  # sessions may end in any order
            torch.library.Library.impl = original  # type: ignore[method-assign]


def is_torchs(file: str) -> bool:
    """True for a file of torch or of this package, in Python or in C++; False for those that register for others."""
    if file.startswith(_FOR_OTHERS):
        return False
    return file.startswith(_build_roots()) or makers.is_torchs_file(file)


def told(place: Place) -> str:
    """The place of a registration, for the reader."""
    if registers_for_others(place):
        return "a file that torch did not note (it was registered by a function of torch.library)"
    return str(place)


def registers_for_others(place: Place) -> bool:
    """True where torch noted itself, and not its caller."""
    return place.file.startswith(_FOR_OTHERS)


@functools.cache
def _build_roots() -> tuple[str, ...]:
    """Folders of the sources that this torch was built from, of which the C++ registrations have the paths."""
    root, is_found, _ = str(registered("aten::add.Tensor").schema).partition(_ANCHOR)
    sources = ("aten/", "build/", "c10/", "caffe2/", "torch/") if is_found else ()
    return tuple(f"{root}{folder}" for folder in sources)


def whose_op(name: str) -> Place | None:
    """The place of an op that torch did not register, one of this package too; None for torch's own."""
    return _whose(registered(name))


def _whose(found: Registered) -> Place | None:
    name, schema = found.name, found.schema
    if schema is None:
        is_torchscripts = torch._C._jit_get_schemas_for_operator(name.partition(".")[0])
        return None if is_torchscripts else Place("a library that is gone")
    own_function = kernels.custom_op_functions(name)[:1]
    place = _caller(schema, own_function)
    if registers_for_others(place):
        place = fake_kernel(name) or place
    is_called_by_torch = name.partition("::")[0] in _CALLERS_IN_TORCH
    if is_called_by_torch and registers_for_others(place):
        return None
    is_torchs_own = is_torchs(place.file) and not makers.is_ours(place.file)
    return None if is_torchs_own else place


def _caller(noted: Place, functions: list[Any]) -> Place:
    """Who asked for a registration of a custom op with these functions, where torch noted only itself."""
    if not functions or not registers_for_others(noted):
        return noted
    return place_of((makers.made_by_others(functions) or functions)[0])


def overloads(name: str) -> list[str]:
    """All overloads of `namespace::op` in the dispatcher, with their whole names."""
    return [one for one in all_ops() if one.partition(".")[0] == name]


def all_ops() -> list[str]:
    """Every overload in the dispatcher."""
    return list(torch._C._dispatch_get_all_op_names())


def replaced_kernels(name: str) -> Iterator[tuple[str, Place]]:
    """(dispatch key, where it was registered) of the kernels of torch's op that torch did not register.

    Left out are kernels that compute shapes, and those of a device whose kernels are all its library's.
    """
    return _replaced(registered(name))


def _replaced(found: Registered) -> Iterator[tuple[str, Place]]:
    name = found.name
    functions = kernels.custom_op_functions(name)
    torchs_keys = frozenset[str]()
    if name.partition("::")[0] in _CALLERS_IN_TORCH:
        torchs_keys = _KEYS_BY_TORCH - found.replaced
    for key, noted in found.kernels.items():
        place = _caller(noted, functions)
        is_torchs_call = key in torchs_keys and registers_for_others(place)
        if _LEFT_OUT.search(key) or is_torchs_call:
            continue
        if not is_torchs(place.file):
            yield key, place


def all_replaced_kernels(*, thorough: bool) -> Iterator[tuple[str, str, Place]]:
    """(op, dispatch key, where it was registered) of all kernels of torch's ops that torch did not register.

    Looking through the dispatcher takes 0.2 s, so it is done when a registration in Python or a new op shows that there
    is something to find; with `thorough` also when any library in C++ was loaded since, which may only add kernels.
    """
    # It changes when Python registers ops or kernels, or when there are more ops.
    state = hash((frozenset(torch.library._impls), len(all_ops()), len(torch.ops.loaded_libraries)))
    if thorough:
        _loaded.append(_num_loads())
    yield from _replaced_kernels(state, _loaded[-1])
    for op in _used_ops():
        for key, function in op.py_kernels.items():
            made = inspect.unwrap(function)
            name = str(getattr(key, "name", key))
            if makers.is_others(made) and not _LEFT_OUT.search(name):
                yield op.name(), f"{name} in Python", place_of(made)


@functools.lru_cache(maxsize=2)
def _replaced_kernels(_state: int, _num_loads: int) -> tuple[tuple[str, str, Place], ...]:
    found = []
    for op in map(registered, all_ops()):
        if _whose(op) is None:
            found += [(op.name, key, place) for key, place in _replaced(op)]
    return tuple(found)


_loaded = [0]
"""Libraries that were loaded before the dispatcher was looked through."""


class _LoadedObject(ctypes.Structure):
    """`struct dl_phdr_info` of the C library."""

    _fields_: ClassVar = [
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16),
        ("num_loads", ctypes.c_ulonglong),
    ]


def _num_loads() -> int:
    """How many libraries this process has loaded so far; 0 where the C library does not count them."""
    counts: list[int] = []

    def read(loaded: Any, size: int, _: Any) -> int:
        if size >= ctypes.sizeof(_LoadedObject):
            counts.append(loaded.contents.num_loads)
        return 1  # all have the same count

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p)
    iterate = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None)
    if iterate is not None:
        iterate(kind(read), None)
    return sum(counts)


def _used_ops() -> Iterator[Any]:
    for namespace in _held(torch.ops, torch._ops._OpNamespace):
        for packet in _held(namespace, torch._ops.OpOverloadPacket):
            yield from _held(packet, torch._ops.OpOverload)


def _held(holder: Any, kind: type) -> list[Any]:
    return [value for value in list(vars(holder).values()) if isinstance(value, kind)]


def higher_order_kernels(name: str) -> list[Any]:
    """The class of a higher-order op, and the functions that were registered with it."""
    op: Any = torch._ops._higher_order_ops.get(name)
    return [] if op is None else [type(op), *op.py_kernels.values(), *op.python_key_table.values()]


def fake_kernel(name: str) -> Place | None:
    """The place where the fake kernel of an op was registered; None without one."""
    entry = _simple_registry.singleton._data.get(name)
    kernel = entry and entry.fake_impl.kernel
    if kernel is None:
        return None
    file, _, line = str(kernel.source).rpartition(":")
    return Place(file, int(line))


def place_of(made: Any) -> Place:
    """File and line of a function or class."""
    code = getattr(made, "__code__", None)
    if code is not None:
        return Place(code.co_filename, code.co_firstlineno)
    try:
        return Place(makers.file_of(made), inspect.getsourcelines(made)[1])
    except (OSError, TypeError):
        return Place(makers.file_of(made))
