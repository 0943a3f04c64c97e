"""A line of source -> whether it is the user's: a program is not fixed inside torch or the standard library."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import FrameType

from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import UserLine

_PACKAGE = Path(__file__).resolve().parents[2]
_MAX_PARTS = 64
"""Folders in the path of a library's file, at most."""
BETWEEN = (
    "autostart", "by_size", "cli", "collectives", "dryrun", "evidence", "fastpath", "fusion", "gate", "preflight",
    "profiles", "pytest_plugin", "ranks", "recording", "report", "sentinel", "torch_api",
)  # fmt: skip
"""Our packages that run between the user's line and torch; the lines of all others count as the user's."""
_FORMER = ("dist", "parity", "capture")
"""Their names in logs of earlier versions."""
_OWN = re.compile(
    rf"/{re.escape(_PACKAGE.name)}/(?!gate/faults/)(?:{'|'.join((*BETWEEN, *_FORMER))})/"
    rf"|(?:^{re.escape(str(_PACKAGE))}|/site-packages/{re.escape(_PACKAGE.name)})/\w+\.py$"
)
"""Files of these packages, wherever they are installed; the faults of the gate stand for a user's program.

Of our modules outside of packages those of this process, and installed ones: a checkout may have the user's beside it.
"""
_TORCH = re.compile(
    r"/(?:site-packages|dist-packages)/(?:torch|torchgen|functorch)/"
    r"|^/.*/torch/(?:_\w+|amp|ao|autograd|compiler|cuda|distributed|export|fx|nn|optim|testing|utils)(?:/|\.py$)"
)
"""Installed, or built in a checkout."""
_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages)/")
_CALLS_MODULE = ("torch/nn/modules/module.py", "torch/_dynamo/eval_frame.py")
"""Ends of the paths of the files in which torch calls a compiled module."""
_STANDARD = re.compile(r"/lib(?:64)?/python\d(?:\.\d+)?/(?!site-packages/|dist-packages/)|^<frozen ")
"""A file of the standard library on any machine: logs may come from a different one."""


_GENERATED = re.compile(r"/([a-z2-7]{2})/c\1[a-z2-7]{20,}\.py$")
"""A module that Inductor has generated, in whatever folder its cache is: named by the hash of its code."""


@functools.lru_cache(maxsize=4096)
def is_library(line: UserLine) -> bool:
    """True for a line of torch, of our own wrappers or of the standard library."""
    return is_library_file(line.file) or _is_cut_library(line.file, line.line, line.code)


def users(line: UserLine | None) -> UserLine | None:
    """The line where it is the user's, else None."""
    return None if line is None or is_library(line) else line


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """True for a file of those, or one that torch has generated, given with its whole path."""
    return any(place.search(file) for place in (_OWN, _TORCH, _STANDARD, _GENERATED))


def is_packaged(file: str) -> bool:
    """True for a file of torch or of an installed package: what happens there the user can only call or not."""
    return bool(installed_in(file)) or _TORCH.search(file) is not None


def in_package(file: str) -> str:
    """The path of such a file from its package on: `torch/optim/optimizer.py`."""
    return file.removeprefix(installed_in(file))


def is_installed(line: UserLine) -> bool:
    """True for a line of any installed package, torch among them: the program that uses it is elsewhere."""
    return bool(installed_in(line.file))


def installed_in(file: str) -> str:
    """The folder that an installer put the file's package into, with a slash at its end; empty for a user's file."""
    site = _PACKAGES.match(file)
    if site is not None:
        return site[0]
    for folder, tops in _targets(tuple(sys.path)).items():
        if file.startswith(folder) and file.removeprefix(folder).partition("/")[0] in tops:
            return folder
    return ""


@functools.cache
def _targets(paths: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Folders of this process that `pip install --target` has filled -> the names in them that it installed.

    A program may lie in the same folder: only what the installer's records list is a package.
    """
    found = {}
    for path in paths:
        if not isinstance(path, str) or _PACKAGES.match(f"{path}/"):
            continue
        names = set()
        with suppress(OSError, TypeError, ValueError):  # a folder that this user may not read, a path of bytes
            for record in sorted(Path(path).glob("*.dist-info/RECORD")):
                names |= {row.partition("/")[0].partition(",")[0] for row in record.read_text().splitlines()}
        if names:
            found[f"{Path(path).absolute()}/"] = frozenset(names - {"..", ""})
    return found


def in_program(line: UserLine | None, frame: UserLine | None) -> str:
    """`, in forward of /app/model.py:3` for a line in an installed package that a user's compiled function leads to."""
    is_packages = line is not None and is_installed(line)
    if frame is None or not is_packages or is_installed(frame):
        return ""
    return f", in {frame.function or 'the compiled code'} of {frame.file}:{frame.line}"


def innermost_own(stack: Sequence[UserLine]) -> UserLine | None:
    """The user's innermost line in a stack, which is outermost first; None when there is none."""
    return last(own_lines(stack))


def innermost(stack: Sequence[UserLine]) -> UserLine | None:
    """The user's innermost line in a stack; where no line is the user's, the innermost line."""
    return innermost_own(stack) or last(stack)


def traceback_of(error: BaseException) -> list[UserLine]:
    """The lines that an exception passed, outermost first; of a SyntaxError, the line that cannot be read as well."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text))
    return lines_of(frames)


def line_of_frame(frame: FrameType) -> UserLine:
    """The line that `innermost` gives for the stack of a frame; the source of the other frames is not read."""
    for one, line in traceback.walk_stack(frame):
        if not is_library_file(one.f_code.co_filename):
            return line_at(one, line)
    return line_at(frame, frame.f_lineno)


def line_at(frame: FrameType, number: int) -> UserLine:
    """A line of a frame, with its code."""
    file = frame.f_code.co_filename
    code = linecache.getline(file, number, frame.f_globals).strip()
    return UserLine(file=file, line=number, function=frame.f_code.co_name, code=code)


def lines_of(frames: Iterable[traceback.FrameSummary]) -> list[UserLine]:
    """The lines of frames, in their order."""
    return [UserLine(file=one.filename, line=one.lineno or 0, function=one.name, code=one.line or "") for one in frames]


def with_whole_path(line: UserLine, files: Collection[str]) -> UserLine:
    """The line with its whole path, where exactly one of the files fits: in comments torch keeps the end of a path."""
    whole = [f"/{file}" for file in files]
    fitting = [file for file in whole if file.endswith(f"/{line.file}")]
    if not fitting:
        fitting = [file for file in whole if file.endswith(line.file)]
    if len(fitting) != 1:
        return line
    file = fitting[0].removeprefix("/")
    return line.changed(file=file)


def own_lines(stack: Iterable[UserLine]) -> list[UserLine]:
    """The user's lines, in order."""
    return [line for line in stack if not is_library(line)]


def own_line(line: UserLine | None, stack: Sequence[UserLine]) -> UserLine | None:
    """The user's line of a compiled frame; of a frame inside torch, a wrapped `nn.Sequential`, the caller's line."""
    if line is None or not is_library(line):
        return line
    return innermost_own(stack) or line


def entered_at(line: UserLine | None, stack: Sequence[UserLine]) -> UserLine | None:
    """The user's line of a compiled frame; of a frame of an installed package, the program's line that enters it."""
    own = own_line(line, stack)
    if own is None or not is_installed(own):
        return own
    return of_program(stack) or own


def called_at(stack: Sequence[UserLine]) -> UserLine | None:
    """The line of the program that called the compiled frame, the last of `stack`; None where that is not known.

    Torch (2.11 to 2.13) leaves out the two frames before the compiled one. Those of a module are torch's own, and the
    frame before them is `Module.__call__` or the wrapper of `torch.compile`; those of a function include its caller.
    """
    before = last(stack[:-1])
    if before is None or not before.file.endswith(_CALLS_MODULE):
        return None
    return of_program(stack[:-1])


def of_program(stack: Sequence[UserLine]) -> UserLine | None:
    """The user's innermost line that is not in an installed package."""
    return last([line for line in own_lines(stack) if not is_installed(line)])


def _is_cut_library(file: str, line: int, code: str) -> bool:
    """True for a line of a library whose path torch cut at the front: the library's file has that code there."""
    if file.startswith("/") or not code:
        return False
    parts = file.split("/")
    is_inside = len(parts) <= _MAX_PARTS and ".." not in parts
    if not is_inside:  # a peer may send any path; only files of the library are read
        return False
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    for folder, end in itertools.product(_library_folders(), ends):
        path = os.path.join(folder, end)
        if code in linecache.getline(path, line):
            return True
    return False


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """The folders of torch and of the standard library here, found without importing torch."""
    standard = sysconfig.get_paths()["stdlib"]
    try:
        return str(metadata.distribution("torch").locate_file("torch")), standard
    except metadata.PackageNotFoundError:
        return (standard,)
