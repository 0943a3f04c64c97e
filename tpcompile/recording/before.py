"""What the program had set when a recording began: variables of its running functions and of its modules.

A rank that read other settings before the recording executes the same lines as its peers, and computes something else.
Nothing is kept but small values: numbers, flags, dtypes, shapes, and hashes of texts, which may be secret.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from tpcompile.evidence.timeline.flow import Set
from tpcompile.recording.assigned import assigned
from tpcompile.recording.variables import variables_of

_MAX_ROWS, _MAX_MODULES = 2000, 64
_MAX_DEPTH = 3
"""`trainer.config.width` is looked at, what it holds is not."""
_MAX_ITEMS = 32
"""Of a container, or attributes of an object."""
_PLAIN = (bool, int, float, complex, type(None), torch.dtype)
_NUMBER = re.compile(r"\d+")


def set_before(frame: FrameType | None, is_followed: Callable[[str], bool]) -> tuple[Set, ...]:
    """Of the modules that are followed, then of the functions that run, the outermost first: what each has set."""
    return tuple(islice(_rows(frame, is_followed), _MAX_ROWS))


def _rows(frame: FrameType | None, is_followed: Callable[[str], bool]) -> Iterator[Set]:
    running = [one for one in _stack(frame) if is_followed(one.f_code.co_filename)][::-1]
    of_frames = {one.f_code.co_filename for one in running if one.f_code.co_name == "<module>"}
    modules = [(vars(module).get("__file__"), module) for module in sys.modules.values() if type(module) is ModuleType]
    own = [(file, module) for file, module in modules if type(file) is str and is_followed(file)]
    for file, module in own[:_MAX_MODULES]:
        if file not in of_frames:
            yield from _of_code(file, "<module>", _lines_of_module(file), vars(module))
    for one in running:
        code = one.f_code
        with variables_of(one) as variables:
            yield from _of_code(code.co_filename, code.co_qualname, _lines(code, one.f_lineno), variables)


@lru_cache(maxsize=256)
def _lines_of_module(file: str) -> Mapping[str, int]:
    try:
        code = compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return _lines(code, 1 << 30)


def _lines(code: CodeType, until: int) -> Mapping[str, int]:
    """Name -> the last line above `until` that sets it; of an argument, the first line."""
    found = assigned(code)
    lines = {name: code.co_firstlineno for _, name, _ in found.arguments}
    for at, line in enumerate(found.by_line, start=code.co_firstlineno):
        if line is not None and at < until:
            lines |= {name: at for _, name, attribute in line.specs if attribute is None}
    return lines


def _of_code(file: str, function: str, lines: Mapping[str, int], variables: Mapping[str, Any]) -> Iterator[Set]:
    for name, at in lines.items():
        if name in variables and not name.startswith("__"):
            for path, text in _texts(name, variables[name], 1):
                yield Set(file=file, function=function, line=at, name=path, value=text)


def _texts(path: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """A value as text, or those of its attributes; nothing for what has no text that is the same on all ranks."""
    text = _text(value)
    if text is not None:
        yield path, text
        return
    for name, one in _held(value) if depth <= _MAX_DEPTH else ():
        yield from _texts(f"{path}.{name}", one, depth + 1)


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, or entries of a dict, by name; no code of the value's class runs."""
    if issubclass(type(value), (type, ModuleType)):
        return
    is_dict = type(value) is dict
    has_attributes = inspect.getattr_static(value, "__dict__", None) is not None
    held = value if is_dict else object.__getattribute__(value, "__dict__") if has_attributes else None
    if type(held) is dict:
        yield from ((name, one) for name, one in list(held.items())[:_MAX_ITEMS] if type(name) is str)


def _text(value: Any) -> str | None:
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is torch.device:
        return str(value.type)  # of a rank's own device the index is its role
    if kind is str:
        return f"text {hashlib.sha256(_without_rank(value).encode()).hexdigest()[:8]}"
    if kind in (torch.Tensor, torch.nn.Parameter):
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{value.dtype} {list(value.shape)}{grad}"
    if kind in (list, tuple, torch.Size):
        parts = [_text(item) for item in value[:_MAX_ITEMS]]
        return _joined(kind, parts, len(value)) if any(parts) or not value else None
    if kind is dict:
        parts = [_text(part) for item in list(value.items())[:_MAX_ITEMS] for part in item]
        return _joined(kind, parts, len(value)) if None not in parts else None
    return None


def _without_rank(text: str) -> str:
    """The text without the number of this rank in it: `cuda:1`, `shard_1.pt`."""
    own = {os.environ.get("RANK"), os.environ.get("LOCAL_RANK")}
    return _NUMBER.sub(lambda number: "#" if number[0] in own else number[0], text)


def _joined(kind: type, texts: Sequence[str | None], length: int) -> str:
    parts = ", ".join(text or "?" for text in texts)
    short = parts if len(parts) <= 60 else hashlib.sha256(parts.encode()).hexdigest()[:8]
    return f"{kind.__name__} of {length}: {short}"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
