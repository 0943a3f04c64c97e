"""A line of source -> the lines around it, from the file where it still has that line."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from tpcompile.evidence.records import UserLine

_AROUND = 4
"""Lines before and after."""
_MAX_BYTES = 2_000_000
"""Larger files are not read; a module of this size is generated."""
_MAX_CHARS = 300
"""Longest line that is shown."""


@dataclass(frozen=True)
class Excerpt:
    """Lines of a file."""

    place: str
    """`file:line in function`."""
    first: int
    """Number of the first of the lines."""
    at: int
    """Number of the line that is meant."""
    lines: tuple[str, ...]


def excerpt(line: UserLine | None) -> Excerpt | None:
    """The lines around; only the line itself where the file is gone, was edited, or is no Python file.

    The path is what a rank wrote into its record, so a file is shown only if it is Python and has that code on that
    line: a record that was tampered with cannot bring other files into the page.
    """
    if line is None or not (line.code.strip() or line.file):
        return None
    code = line.code.strip()
    source = _source(line.file) if code and line.file.endswith(".py") else ()
    if not 0 < line.line <= len(source) or source[line.line - 1].strip() != code:
        return Excerpt(str(line), line.line, line.line, (code[:_MAX_CHARS],) if code else ())
    first = max(1, line.line - _AROUND)
    shown = source[first - 1 : line.line + _AROUND]
    return Excerpt(str(line), first, line.line, tuple(text[:_MAX_CHARS] for text in shown))


@functools.lru_cache(maxsize=64)
def _source(file: str) -> tuple[str, ...]:
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return ()
        return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError):  # a null byte in a path is a ValueError
        return ()
