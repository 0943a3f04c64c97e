"""Name -> a folder that only this user can read and write: for code that is loaded, and for what its processes share.

A file at a known path in the temporary folder may have been put there by any user of the machine.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tpcompile.errors import PreflightError

_OWN = "tpcompile"
_ALL_USERS = "4294967295"
"""The number of users that `uid_map` maps outside of user namespaces."""


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/tpcompile/NAME`, by default in ~/.cache; in the temporary folder where that is not private.

    Raises PreflightError when neither is.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # ignored, as the XDG base directory specification demands
        home = Path(os.path.expanduser("~")) / ".cache"
    own = [home / _OWN] if home.is_absolute() else []
    return _first_private([*own, _temporary()], name)


def shared_folder(name: str) -> Path:
    """`tpcompile-UID/NAME` in the temporary folder: equal for all processes of this user on this machine.

    Raises PreflightError when it is not private.
    """
    return _first_private([_temporary()], name)


def made_once(file: Path, make: Callable[[Path], object]) -> Path:
    """The file; made by `make` at a path of its own where there is none: who reads it meanwhile finds all of it."""
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as partial:
            made = Path(partial, file.name)
            make(made)
            made.replace(file)
    return file


def _temporary() -> Path:
    return Path(tempfile.gettempdir()).absolute() / f"{_OWN}-{os.geteuid()}"


def _first_private(candidates: Sequence[Path], name: str) -> Path:
    problems = []
    for folder in candidates:
        try:
            _make(folder)
            problem = _problem_of(folder)
            if not problem:
                _make(folder / name)
                return folder / name
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
        problems.append(problem)
    raise PreflightError(
        f"no folder for {name} is private to this user: {'; '.join(problems)}; "
        "set XDG_CACHE_HOME and TMPDIR to folders that only you can write to"
    )


def _make(folder: Path) -> None:
    """Make the folder and those above it that are missing, for this user alone."""
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def _problem_of(folder: Path) -> str:
    """Why other users may read or replace what is in this folder; empty when they cannot."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder, or a link to one"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"{folder} has mode {stat.S_IMODE(found.st_mode):o}, not 700"
    real = Path(os.path.realpath(folder))
    opened = next(filter(_is_open, real.parents), None)
    return "" if opened is None else f"{opened}, above {folder}, can be changed by other users"


def _is_open(folder: Path) -> bool:
    """True where a different user can put a folder of its own in the place of one inside."""
    found = folder.stat()
    is_foreign = found.st_uid not in (0, os.geteuid(), _owner_of_unmapped())
    is_writable = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    return is_foreign or bool(is_writable)


@cache
def _owner_of_unmapped() -> int:
    """The user that root's folders seem to belong to in a container without root; -1 outside of one."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split()
        owner = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:  # no procfs
        return -1
    are_all_mapped = mapped[-1] == _ALL_USERS
    return -1 if are_all_mapped else owner
