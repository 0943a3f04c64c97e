"""Python stack -> the user's line and the module that an op comes from."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

from tpcompile import collectives, torch_api
from tpcompile.torch_api.watching import frames_from


def _folders(*files: str) -> tuple[str, ...]:
    """The folders of modules as they were imported and without links: code of a linked environment may have either."""
    paths = [Path(file) for file in files]
    return tuple(f"{one.parent}/" for one in (*paths, *(path.resolve() for path in paths)))


_OWN = _folders(__file__, collectives.__file__, torch_api.__file__)
_OLD_NAMES = typing_extensions.__file__
_SKIPPED = (*_OWN, *_folders(torch.__file__), _OLD_NAMES, str(Path(_OLD_NAMES).resolve()))
"""This package, our collectives and names of torch, torch, its decorator for old names: a frame in them is never the
user's."""
_OUTERMOST = str(Path(__file__).with_name("targets.py"))
"""What called this is a command line, not the user's code."""

GENERATED = "GeneratedBackwardFor_"
"""How the Functions begin that `torch.library` makes of `register_autograd`; torch 2.11 and 2.13."""


@dataclass(frozen=True)
class Site:
    """One line of the user's code."""

    file: str = "<unknown>"
    line: int = 0
    function: str = ""
    source: str = ""
    """Text of the line."""
    module: str = ""
    """Innermost nn.Module whose forward is running, as `layers.0.mlp (GeluMLP)`; empty outside of modules."""

    @property
    def short(self) -> str:
        """`at mlp.py:12`; where no line of the user's is known, the module."""
        return f"at {Path(self.file).name}:{self.line}" if self.line else f"in {self.module}"

    def __str__(self) -> str:
        inside = f" of {self.module}" if self.module else ""
        return f"{self.file}:{self.line} in {self.function}{inside}: {self.source}"


def current_site(module_names: Mapping[int, str]) -> Site:
    """Innermost frame outside of torch, of our collectives and of this package; `module_names` maps id -> name."""
    frames = [frame for frame in _frames() if not frame.f_code.co_filename.startswith(_OWN)]
    module = ""
    for frame in frames:
        # A function without `self` belongs to the module around it. Reading f_locals keeps all locals of a frame alive
        # as long as the frame. Those of a frame of this package would never be freed, because they hold it themselves.
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and id(owner) in module_names:
            module = module_names[id(owner)]
            break
    for frame in frames:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(_SKIPPED):
            source = linecache.getline(file, line, frame.f_globals).strip()
            return Site(file, line, frame.f_code.co_name, source, module)
    return Site(module=module)


def _frames() -> Iterator[FrameType]:
    """The callers' frames, innermost first."""
    return takewhile(lambda frame: frame.f_code.co_filename != _OUTERMOST, frames_from(sys._getframe(1)))


def user_function() -> str:
    """Name of the user's autograd.Function whose forward runs the op, and whose gradient only its author knows.

    Empty outside of one.
    """
    names = (str(cls.__name__) for cls in _classes())
    return next((name for name in names if not name.startswith(GENERATED)), "")


def in_generated_function() -> bool:
    """True when the op runs in a Function that torch made for one of its ops, which has that op's gradient."""
    return any(cls.__name__.startswith(GENERATED) for cls in _classes())


def in_function_of_torch() -> bool:
    """True when the op runs in a Function of torch's own, such as a checkpoint: nothing is known of its gradient."""
    return any(cls.__module__.startswith("torch.") for cls in _classes())


def _classes() -> Iterator[type]:
    """The autograd.Functions around an op, innermost first."""
    apply = torch.autograd.Function.apply.__func__.__code__
    for frame in _frames():
        if frame.f_code is apply:
            yield frame.f_locals["cls"]
