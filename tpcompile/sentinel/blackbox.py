"""A process that aborts -> the stack of its main thread, for the remaining ranks.

gloo and NCCL end a process with SIGABRT from a thread of their own when ranks send different sizes, and no Python code
runs after that. faulthandler then writes the stacks from C, into a file that the other ranks of this host can read.
Ranks tell each other its name alone, a random number: each looks for it in the folder that this user alone can use.
"""

from __future__ import annotations

import faulthandler
import re
import secrets
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO

from tpcompile.errors import PreflightError
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import known
from tpcompile.private_folder import shared_folder
from tpcompile.ranks.liveness import host_name
from tpcompile.recording.ring import forget_ring
from tpcompile.sentinel import flight
from tpcompile.sentinel.events import Absence
from tpcompile.sentinel.process import Process
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.store_log import StoreLog

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_CURRENT = re.compile(r"^Current thread 0x(?P<ident>[0-9a-f]+)", re.MULTILINE)
_MAX_BYTES = 1 << 20
"""faulthandler writes 100 frames of 100 threads at most."""


class BlackBox:
    """The file that faulthandler writes if this process aborts.

    Where the program uses faulthandler already, as torchrun's `record` decorator does, it writes here meanwhile, and to
    stderr afterwards: Python does not expose where it wrote before.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._was_enabled = False
        self.name = ""
        """Name for the other ranks, empty when there is no file."""

    def open(self) -> None:
        """Enable faulthandler, so that a fatal signal writes the stacks; log why, where there is no file for them."""
        name = secrets.token_hex(8)
        try:
            self._file = _path(name).open("x")
        except (OSError, PreflightError) as error:
            logger.warning("if this rank aborts, its stack is not known: {}", error)
            return
        self.name, self._was_enabled = name, faulthandler.is_enabled()
        faulthandler.enable(self._file, all_threads=True)

    def close(self) -> None:
        """Disable faulthandler, or leave it enabled as it was, and remove the file."""
        if self._file is None:
            return
        faulthandler.disable()
        if self._was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__, all_threads=True)
        self._file.close()
        forget(self.name)
        self._file, self.name = None, ""


def absences(log: StoreLog, ranks: Collection[int]) -> dict[int, Absence]:
    """What is known about the processes of ranks that do not answer."""
    return {rank: absence_of(log.process_of(rank)) for rank in sorted(ranks)}


def absence_of(process: Process) -> Absence:
    """What is known about a rank that does not answer, from the process it registered."""
    how = process.state()
    if how != "dead":
        return Absence(how, host=host_name(process.host))
    name = process.black_box
    stack, has_ended = last_stack(name, process.main_thread), has_aborted(name, process.main_thread)
    return Absence(how, stack, has_ended, host_name(process.host))


def forget(name: str) -> None:
    """Remove the file of a process that has ended."""
    if name:
        forget_ring(name)
        with suppress(OSError, PreflightError):
            _path(name).unlink()


def has_aborted(name: str, ident: int) -> bool:
    """True when a thread of gloo or NCCL ended the process by SIGABRT: no crash, and not abort() in thread `ident`."""
    text = _text(name)
    is_by_program = any(int(one["ident"], 16) == ident for one in _CURRENT.finditer(text))
    return text.startswith("Fatal Python error: Aborted") and not is_by_program


def last_stack(name: str, ident: int) -> tuple[UserLine, ...]:
    """The user's frames of thread `ident`, outermost first, that an aborted process left."""
    frames: list[UserLine | None] = []
    is_wanted = False
    text = _text(name)
    for text_line in text.splitlines():
        thread = _THREAD.match(text_line)
        if thread:
            is_wanted = int(thread["ident"], 16) == ident
        elif is_wanted:
            frame = _FRAME.match(text_line)
            if frame:
                frames.append(flight.user_line(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(reversed(known(frames)))


def _path(name: str) -> Path:
    """Raises PreflightError without a private folder."""
    return shared_folder("stacks") / f"{name}.stacks"


def _text(name: str) -> str:
    """Content of the file, empty when there is none or it cannot be read."""
    if not name:
        return ""
    try:
        with _path(name).open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, PreflightError):
        return ""
