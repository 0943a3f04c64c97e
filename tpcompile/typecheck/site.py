"""Python stack -> the user's line and module an op comes from."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from tpcompile.collectives import api as collectives

_OWN = tuple(f"{Path(file).resolve().parent}/" for file in (__file__, collectives.__file__))
_SKIPPED = (*_OWN, f"{Path(torch.__file__).resolve().parent}/")
"""This package, tpcompile/dist and torch: frames that are never the user's."""


@dataclass(frozen=True)
class Site:
    """One line of the user's code."""

    file: str = "<unknown>"
    line: int = 0
    function: str = ""
    source: str = ""
    """Text of the line."""
    module: str = ""
    """Innermost nn.Module that runs, as `layers.0.mlp (GeluMLP)`; empty outside of modules."""

    def __str__(self) -> str:
        inside = f" of {self.module}" if self.module else ""
        return f"{self.file}:{self.line} in {self.function}{inside}: {self.source}"


def current_site(module_names: Mapping[int, str]) -> Site:
    """Innermost frame outside of torch, tpcompile.dist and this package; `module_names` maps id -> name."""
    module = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not module and not file.startswith(_OWN):
            module = _module_of(frame, module_names)
        if not file.startswith(_SKIPPED):
            return _site_of(frame, module or _module_around(frame, module_names))
    return Site(module=module)


def _site_of(frame: FrameType, module: str) -> Site:
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line, frame.f_globals).strip()
    return Site(file, line, frame.f_code.co_name, source, module)


def _module_around(frame: FrameType, names: Mapping[int, str]) -> str:
    """A function without `self` belongs to the module that called it."""
    found = (_module_of(outer, names) for outer in _frames(frame))
    return next((name for name in found if name), "")


def _module_of(frame: FrameType, names: Mapping[int, str]) -> str:
    # Reading f_locals keeps all locals of a frame alive as long as it; of a frame of this package it would be for good,
    # because they hold the frame itself.
    owner = frame.f_locals.get("self")
    return names.get(id(owner), "") if isinstance(owner, torch.nn.Module) else ""


def _frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        yield frame
        frame = frame.f_back


def in_user_function() -> bool:
    """The op runs in the forward of an autograd.Function, whose gradient only its author knows."""
    apply = torch.autograd.Function.apply.__func__.__code__
    return any(frame.f_code is apply for frame in _frames())
