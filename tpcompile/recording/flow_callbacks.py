"""The callbacks that append to a ring: in C, built once into a private folder, or in Python without a compiler."""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import inspect
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from tpcompile.errors import PreflightError
from tpcompile.evidence.timeline.flow import (
    ENTRY,
    EXACT,
    HEADER,
    LENGTH,
    LINE_BITS,
    NEAR,
    OWN,
    RETURNED,
    SEED,
    VALUE_BITS,
    Kind,
    Named,
    hashed,
    hashed_as,
    hashed_name,
    near_bits,
    shortened,
    tagged,
    without_own,
)
from tpcompile.private_folder import cache_folder, made_once
from tpcompile.recording.assigned import Line, Spec

_SOURCE = Path(__file__).with_name("flow.c")
_SEARCHED = 256
"""Letters of a text in which numbers of the rank are looked for."""
_ITEMS = 8
"""Most items of a container that are read, half of them its last ones: what was appended is there."""


class InPython:
    """What flow.c does, for machines without a compiler."""

    def attach(
        self, buffer: Any, disable: Any, restart: Any, is_followed: Any, first_start: Any, budget: int, often: int,
        *tensors: Any,
    ) -> None:  # fmt: skip
        self._map, self._disable, self._restart = buffer, disable, restart
        self._is_followed, self._first_start = is_followed, first_start
        self._budget, self._often = budget, often
        self._tensors = tensors
        self._own: frozenset[int] = frozenset()
        self._codes: dict[int, _Followed] = {}
        self._head, self._capacity = HEADER.unpack_from(buffer)[:2]
        self._is_paused = False
        self._second, self._in_second, self._has_disabled = 0, 0, False
        self._times: dict[tuple[int, int], int] = {}

    def know_own(self, numbers: Collection[int]) -> None:
        """The numbers of this rank, which texts may have."""
        self._own = frozenset(numbers)

    def detach(self) -> None:
        self._codes, self._is_paused = {}, True

    def add(self, code: CodeType, number: int, *names: Any) -> None:
        self._codes.setdefault(id(code), _Followed(code, number, *names))

    def knows(self, code: CodeType) -> bool:
        return id(code) in self._codes

    def mark(self, number: int, call: int) -> None:
        if not self._is_paused:
            self._append(time.time_ns(), number, Kind.MARK, call)

    def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def on_start(self, code: CodeType, _offset: int) -> Any:
        if id(code) not in self._codes and self._first_start(code) is self._disable:
            return self._disable
        return self._on_event(code, Kind.START, code.co_firstlineno)

    def on_line(self, code: CodeType, line: int) -> Any:
        return self._on_event(code, Kind.LINE, line)

    def on_return(self, code: CodeType, _offset: int, value: Any) -> Any:
        return self._on_event(code, Kind.RETURN, 0, value)

    def _on_event(self, code: CodeType, kind: Kind, line: int, returned: Any = None) -> Any:
        found = self._codes.get(id(code))
        if self._is_paused or found is None or not self._is_followed(threading.get_ident()):
            return None
        ns = time.time_ns()
        if ns // 1_000_000_000 != self._second:
            self._second, self._in_second = ns // 1_000_000_000, 0
            self._times.clear()
            if self._has_disabled:
                self._has_disabled = False
                self._restart()
        if found.last and kind in (Kind.LINE, Kind.RETURN):
            self._append_values(ns, found, found.stored(found.last, line))
        if returned is not None:
            with suppress(Exception):
                self._append_value(ns, found.number, RETURNED, returned)
        self._append(ns, found.number, kind, line)
        if kind is Kind.START:
            self._append_values(ns, found, found.arguments)
        found.last = line if kind is Kind.LINE else 0
        times = self._times[found.number, line] = self._times.get((found.number, line), 0) + 1
        self._in_second += 1
        if self._in_second > self._budget and times > self._often:
            self._has_disabled = True
            self._append(ns, found.number, Kind.MARK, 0)
            return self._disable
        return None

    def _append_values(self, ns: int, found: _Followed, specs: Collection[Spec]) -> None:
        if not specs:
            return
        self._in_second += len(specs)
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not found.code:
            frame = frame.f_back
        if frame is None:
            return
        for number, name, attribute, is_global in specs:
            variables = frame.f_globals if is_global else frame.f_locals
            with suppress(Exception):  # an object of the user's may be odd in any way
                self._append_value(ns, found.number, number, _held(variables[name], attribute))

    def _append_value(self, ns: int, code: int, number: int, value: Any) -> None:
        is_small = type(value) is int and 0 <= value < EXACT
        known = EXACT | value if is_small else shortened(self._hashed(SEED, value, 0))
        own = shortened(self._hashed(SEED, value, 0, self._own)) if _has_own(value, self._own) else None
        self._in_second += 1
        if type(value) is float:
            self._append(ns, code, Kind.VALUE, NEAR << VALUE_BITS | near_bits(value))
        if own is not None:
            self._append(ns, code, Kind.VALUE, OWN << VALUE_BITS | own)
        if known is not None and issubclass(type(value), (list, tuple)):
            length = list.__len__(value) if issubclass(type(value), list) else tuple.__len__(value)
            self._append(ns, code, Kind.VALUE, LENGTH << VALUE_BITS | min(length, EXACT - 1))
        if known is not None:
            self._append(ns, code, Kind.VALUE, number << VALUE_BITS | known)

    def _hashed(self, number: int, value: Any, depth: int, own: Collection[int] = ()) -> int:
        """The same hash as in flow.c, without running code of the value's class; 0 for what says nothing about it."""
        kind = type(value)
        if value is None or issubclass(kind, (int, float, str)):
            return hashed(number, value, own)
        for base in (tuple, list):
            if issubclass(kind, base) and depth < 2:
                number = tagged(number, b"C", base.__len__(value))
                for item in _items(base, value):
                    self._in_second += 1
                    number = self._hashed(number, item, depth + 1, own) or number
                return number
        for sized in (dict, set, frozenset, deque):
            if issubclass(kind, sized):
                return tagged(number, b"D", sized.__len__(value))
        if kind in self._tensors[3:]:
            return hashed_name(number, _name_of(value), own if kind is self._tensors[4] else ())
        if not self._tensors or kind not in self._tensors[:2]:
            found = _named(value)
            return 0 if found is None else hashed_as(number, *found)
        if self._tensors[2]():
            return 0
        self._in_second += 2
        number = self._hashed(tagged(number, b"T", value.is_contiguous()), tuple(value.shape), 1)
        return self._hashed(hashed_name(number, _name_of(value.dtype)), value.requires_grad, 1)

    def _append(self, ns: int, number: int, kind: Kind, line: int) -> None:
        at = HEADER.size + self._head % self._capacity * ENTRY.size
        ENTRY.pack_into(self._map, at, ns, number, kind << LINE_BITS | line)
        self._head += 1
        self._map[:8] = self._head.to_bytes(8, "little")


@dataclass
class _Followed:
    code: CodeType
    number: int
    by_line: tuple[Line | None, ...] = ()
    arguments: tuple[Spec, ...] = ()
    last: int = 0
    """The line whose values are due; 0 for none."""

    def stored(self, last: int, following: int) -> tuple[Spec, ...]:
        """What the last line has stored, when the frame goes on at the following one; 0 where it returns."""
        offset = last - self.code.co_firstlineno
        line = self.by_line[offset] if 0 <= offset < len(self.by_line) else None
        return line.specs if line is not None and line.first <= following <= line.last else ()


def _held(holder: Any, attribute: str | None) -> Any:
    """The variable's value, or an attribute that the object itself has; raises where there is none."""
    if attribute is None:
        return holder
    if inspect.getattr_static(type(holder), attribute, None) is not None:  # a property, a slot
        raise AttributeError(attribute)
    return object.__getattribute__(holder, "__dict__")[attribute]


def _has_own(value: Any, own: frozenset[int], depth: int = 0) -> bool:
    """True for a text with one of the rank's numbers in it, and for what holds one; no code of a class runs."""
    kind = type(value)
    if issubclass(kind, str):
        text = str.__getitem__(value, slice(_SEARCHED))
        return without_own(text, own) != text
    if kind is torch.device:
        return _has_own(_name_of(value), own)
    for base in (tuple, list):
        if issubclass(kind, base) and depth < 2:
            return any(_has_own(item, own, depth + 1) for item in _items(base, value))
    return False


def _items(base: type[list[Any]] | type[tuple[Any, ...]], value: Any) -> Sequence[Any]:
    """The items that are read, without code of the value's class."""
    if base.__len__(value) <= _ITEMS:
        return base.__getitem__(value, slice(None))
    half = _ITEMS // 2
    return (*base.__getitem__(value, slice(half)), *base.__getitem__(value, slice(-half, None)))


_HEAP_TYPE = 1 << 9
"""Of `type.__flags__`: a class that a program has made, as most of them, and none of the interpreter's own."""


def _named(value: Any) -> tuple[Named, str] | None:
    """The name of a function, class or member of an enumeration, or of an object's class, without code of the class."""
    kind = type(value)
    if kind is MethodType:
        value, kind = value.__func__, type(value.__func__)
    if kind is FunctionType:
        return Named.FUNCTION, value.__qualname__
    if issubclass(kind, type):
        return Named.CLASS, _class_name(value)
    if not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE:
        return None
    if issubclass(type(kind), enum.EnumType):
        return Named.MEMBER, f"{_class_name(kind)}.{object.__getattribute__(value, '_name_')}"
    return Named.INSTANCE, _class_name(kind)


def _class_name(kind: type) -> str:
    return str(type.__dict__["__name__"].__get__(kind))


@lru_cache(maxsize=64)
def _name_of(value: Any) -> str:
    """The text of a dtype or a device, which is made once for each."""
    return str(value)


@cache
def compiled() -> ModuleType | None:
    """The callbacks in C, a module like `InPython`; None where they cannot be built."""

    def build(built: Path) -> None:
        compiler = (os.environ.get("CC") or "cc").split()
        include = f"-I{sysconfig.get_path('include')}"
        command = [*compiler, "-O2", "-shared", "-fPIC", include, str(_SOURCE), "-o", str(built)]
        subprocess.run(command, capture_output=True, check=True, timeout=60)

    try:
        content = f"{sys.version} {sysconfig.get_config_var('EXT_SUFFIX')} {_SOURCE.read_text()}"
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        library = made_once(cache_folder("flow") / f"tpcompile_flow_{digest}.so", build)
        spec = importlib.util.spec_from_file_location("tpcompile_flow", library)
        if spec is None or spec.loader is None:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, PreflightError, ImportError, subprocess.SubprocessError):
        return None
    return module
