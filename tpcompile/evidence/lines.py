"""A line of source -> whether it is the user's: nobody can fix their program inside torch or the standard library."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from importlib import metadata

from tpcompile.evidence.records import UserLine

_TORCH = ("/site-packages/torch/", "/dist-packages/torch/", "/tpcompile/dist/")
_STANDARD = re.compile(r"/lib(?:64)?/python3(?:\.\d+)?/(?!site-packages/|dist-packages/)|^<frozen ")
"""Where the standard library is, on any machine: logs come from others."""


def is_library(line: UserLine) -> bool:
    """True for a line of torch, of our own wrappers or of the standard library."""
    return is_library_file(line.file) or _is_cut_library(line)


def is_library_file(file: str) -> bool:
    """The same of a file with its whole path."""
    return any(part in file for part in _TORCH) or bool(_STANDARD.search(file))


def innermost_own(stack: Sequence[UserLine]) -> UserLine | None:
    """The innermost line of the user's in a stack, which is outermost first; None when there is none."""
    own = [line for line in stack if not is_library(line)]
    return own[-1] if own else None


def _is_cut_library(line: UserLine) -> bool:
    """Torch cuts the front of long paths: the line is a library's when that code stands there in the library's file."""
    if line.file.startswith("/") or not line.code:
        return False
    parts = line.file.split("/")
    ends = [parts[start:] for start in range(len(parts))]
    files = [os.path.join(folder, *end) for folder in _library_folders() for end in ends]
    return any(line.code in linecache.getline(file, line.line) for file in files)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Where torch and the standard library are installed here, found without importing torch."""
    standard = sysconfig.get_paths()["stdlib"]
    try:
        return str(metadata.distribution("torch").locate_file("torch")), standard
    except metadata.PackageNotFoundError:
        return (standard,)
