"""What the program had set when a recording began: variables of its running functions and of its modules.

A rank that read other settings before the recording executes the same lines as its peers, and computes something else.
Nothing is kept but small values: numbers, flags, dtypes, and hashes of texts, which may be secret.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from tpcompile.evidence.timeline.flow import Set, without_own
from tpcompile.recording.assigned import assigned
from tpcompile.recording.own_numbers import own_numbers
from tpcompile.recording.variables import variables_of
from tpcompile.torch_api import watching
from tpcompile.torch_api.flags import num_function_modes

_MAX_ROWS, _MAX_MODULES = 2000, 64
"""Values and modules that are kept at most: all of it is read at once, when the recording begins."""
_MAX_DEPTH = 3
"""`trainer.config.width` is looked at, what it holds is not."""
_MAX_ITEMS = 32
"""Most items of a container, or attributes of an object, that are read."""
_PLAIN = (bool, int, float, complex, type(None), torch.dtype)


def set_before(frame: FrameType | None, is_followed: Callable[[str], bool]) -> tuple[Set, ...]:
    """What the followed modules have set, then what the running functions have, outermost first; at most 2000 rows.

    Where there is more, it is the modules' that is left out: a large program has thousands of constants.
    """
    program = _Program(is_followed)
    running = program.running(frame)
    of_running = tuple(islice(program.rows_of_frames(running), _MAX_ROWS))
    return (*islice(program.rows_of_modules(running), _MAX_ROWS - len(of_running)), *of_running)


class _Program:
    """The code that is followed, and the values in it."""

    def __init__(self, is_followed: Callable[[str], bool]) -> None:
        self._is_followed = is_followed
        self._classes: dict[int, Mapping[str, _Place]] = {}

    def running(self, frame: FrameType | None) -> Sequence[FrameType]:
        """The frames of followed files, outermost first."""
        return [one for one in watching.frames_from(frame) if self._is_followed(one.f_code.co_filename)][::-1]

    def rows_of_modules(self, running: Sequence[FrameType]) -> Iterator[Set]:
        of_frames = {one.f_code.co_filename for one in running if one.f_code.co_name == "<module>"}
        own: list[tuple[str, ModuleType]] = []
        for module in list(sys.modules.values()):
            file = self._file_of(module) if type(module) is ModuleType else ""
            if file and file not in of_frames:
                own.append((file, module))
        for file, module in own[:_MAX_MODULES]:
            yield from self._variables(_lines_of_module(file), vars(module))

    def rows_of_frames(self, running: Sequence[FrameType]) -> Iterator[Set]:
        for one in running:
            with variables_of(one) as variables:
                yield from self._variables(_lines(one.f_code, one.f_lineno), variables)

    def _file_of(self, module: ModuleType | None) -> str:
        """The file of a module that is followed; empty for others."""
        file = vars(module).get("__file__") if module is not None else None
        return file if type(file) is str and self._is_followed(file) else ""

    def _variables(self, lines: Mapping[str, _Place], variables: Mapping[str, Any]) -> Iterator[Set]:
        for name, place in lines.items():
            if name in variables and not name.startswith("__"):
                yield from self._values(name, variables[name], place, 1)

    def _values(self, path: str, value: Any, place: _Place, depth: int) -> Iterator[Set]:
        """A value as text, or those of its attributes; nothing for what has no text that is the same on all ranks."""
        text = _text(value)
        if text is not None:
            without_own = _text(value, own_numbers()) or ""
            own = without_own if without_own != text else ""
            yield Set(file=place.file, function=place.function, line=place.line, name=path, value=text, own=own)
            return
        kind: Any = type(value)
        is_own = bool(self._file_of(sys.modules.get(kind.__module__)))
        lines = self._lines_of_class(kind) if is_own else {}
        for name, one in _held(value, is_own=is_own) if depth <= _MAX_DEPTH else ():
            is_part = issubclass(type(one), torch.nn.Module)  # of a model, however deep
            yield from self._values(f"{path}.{name}", one, lines.get(name, place), depth + (not is_part))

    def _lines_of_class(self, kind: type) -> Mapping[str, _Place]:
        """Attribute -> the line of a method that sets it, of the class itself before those that it inherits from."""
        found = self._classes.get(id(kind))
        if found is None:
            functions: list[FunctionType] = []
            for holder in type.mro(kind):
                functions += [one for one in vars(holder).values() if type(one) is FunctionType]
            places: dict[str, _Place] = {}
            for function in reversed(functions):
                if self._is_followed(function.__code__.co_filename):
                    places |= _lines(function.__code__, 1 << 30, of_self=True)
            found = self._classes[id(kind)] = places
        return found


class _Place(NamedTuple):
    """Where a variable is set."""

    file: str
    function: str
    line: int


@lru_cache(maxsize=256)
def _lines_of_module(file: str) -> Mapping[str, _Place]:
    try:
        code = compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return _lines(code, 1 << 30)


def _lines(code: CodeType, until: int, *, of_self: bool = False) -> Mapping[str, _Place]:
    """Name -> the last line above `until` that sets it; of an argument, the first line. Or attributes of `self`."""
    found = assigned(code)
    numbers = {} if of_self else {name: code.co_firstlineno for _, name, *_ in found.arguments}
    own = code.co_varnames[0] if of_self and code.co_argcount else None
    for at, line in enumerate(found.by_line, start=code.co_firstlineno):
        if line is None or at >= until:
            continue
        for _, name, attribute, _ in line.specs:
            if attribute is None and not of_self:
                numbers[name] = at
            elif attribute is not None and name == own:
                numbers[attribute] = at
    return {name: _Place(code.co_filename, code.co_qualname, at) for name, at in numbers.items()}


def _held(value: Any, *, is_own: bool) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, or entries of a dict, by name; no code of the value's class runs."""
    kind = type(value)
    is_torch_module = issubclass(kind, torch.nn.Module)
    held = value
    if kind is not dict:
        has_attributes = is_own or is_torch_module or kind in (SimpleNamespace, argparse.Namespace)
        is_code = issubclass(kind, (type, ModuleType))
        if is_code or not has_attributes or inspect.getattr_static(value, "__dict__", None) is None:
            return
        held = object.__getattribute__(value, "__dict__")
    if is_torch_module:
        parts: dict[str, Any] = {}
        for table in ("_parameters", "_buffers", "_modules"):
            parts |= held.get(table) or {}
        if is_own:  # what its class sets, not torch
            parts |= {name: one for name, one in held.items() if not name.startswith("_")}
        held = parts
    if type(held) is dict:
        yield from ((name, one) for name, one in list(held.items())[:_MAX_ITEMS] if type(name) is str)


def _text(value: Any, own: Collection[int] = ()) -> str | None:
    """A value as text, of texts a hash of it without the rank's `own` numbers; None for what has none."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is torch.device:
        return str(value.type)  # of a rank's own device the index is its role
    if kind is str:
        return f"text {hashlib.sha256(without_own(value, own).encode()).hexdigest()[:8]}"
    if kind in (torch.Tensor, torch.nn.Parameter) and not num_function_modes():  # a mode would see it
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{value.dtype}, {value.dim()} dimensions{grad}"  # sizes are those of the rank's own shard
    if kind in (list, tuple, torch.Size):
        parts = [_text(item, own) for item in value[:_MAX_ITEMS]]
        return _joined(kind, parts, len(value)) if any(parts) or not value else None
    if kind is dict:
        parts = [_text(part, own) for item in list(value.items())[:_MAX_ITEMS] for part in item]
        return _joined(kind, parts, len(value)) if None not in parts else None
    return None


def _joined(kind: type, texts: Sequence[str | None], length: int) -> str:
    parts = ", ".join(text or "?" for text in texts)
    short = parts if len(parts) <= 60 else hashlib.sha256(parts.encode()).hexdigest()[:8]
    return f"{kind.__name__} of {length}: {short}"
