"""Where the compilers write -> findings: place, size, room, and whether it can be written."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tpcompile.doctor.finding import Finding, fail, warn

_GIB = 1 << 30
_MIN_ROOM_GIB = 2.0
_MAX_S = 2.0
"""Longest time to count the size of a cache."""


def folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Variable -> the folder that is used, torch's and Triton's default where it is not set."""
    temporary = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR")
    user = re.sub(r'[\\/:*?"<>|]', "_", _user(environ))  # as torch names it
    triton_home = Path(environ.get("TRITON_HOME") or Path.home())
    triton = environ.get("TRITON_CACHE_DIR")
    return {
        "TORCHINDUCTOR_CACHE_DIR": Path(inductor) if inductor else temporary / f"torchinductor_{user}",
        "TRITON_CACHE_DIR": Path(triton) if triton else triton_home / ".triton" / "cache",
        "TMPDIR": temporary,
    }


def caches(environ: Mapping[str, str]) -> list[Finding]:
    """One finding for each folder."""
    return [_cache(variable, folder) for variable, folder in folders(environ).items()]


def _user(environ: Mapping[str, str]) -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return environ.get("USER") or str(os.getuid())


def _cache(variable: str, folder: Path) -> Finding:
    name = f"cache {variable}" if variable != "TMPDIR" else "temporary files"
    problem = _unwritable(folder)
    if problem:
        return fail(
            name, f"{folder} cannot be written: {problem}", f"set {variable} to a directory that can be written"
        )
    existing = _existing(folder)
    room_gib = shutil.disk_usage(existing).free / _GIB
    size = "" if variable == "TMPDIR" else f"{_size_text(folder)}, "
    says = f"{folder}: {size}{room_gib:.1f} GiB free"
    if room_gib < _MIN_ROOM_GIB:
        return warn(name, says, f"free some, or set {variable} to a directory with room")
    return Finding(name=name, says=says)


def _existing(folder: Path) -> Path:
    """The folder, or the one above it in which it would be made."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _unwritable(folder: Path) -> str:
    existing = _existing(folder)
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _size_text(folder: Path) -> str:
    """Bytes of its files, or a lower bound where counting takes too long."""
    if not folder.exists():
        return "not made yet"
    total_bytes, bound = 0, ""
    until = time.monotonic() + _MAX_S
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                total_bytes += os.lstat(os.path.join(path, file)).st_size
            except OSError:  # deleted meanwhile
                continue
        if time.monotonic() > until:
            bound = "more than "
            break
    size = f"{total_bytes / _GIB:.1f} GiB" if total_bytes > _GIB else f"{total_bytes >> 20} MiB"
    return f"{bound}{size} used"
