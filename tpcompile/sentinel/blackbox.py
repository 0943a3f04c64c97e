"""A process that aborts -> the stack of its main thread, for the remaining ranks.

gloo and NCCL end a process with SIGABRT from a thread of their own when ranks send different sizes, and no Python code
runs after that. faulthandler then writes the stacks from C, into a file that the other ranks of this host can read.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import known
from tpcompile.sentinel import flight
from tpcompile.sentinel.events import Absence
from tpcompile.sentinel.process import Process
from tpcompile.sentinel.store_log import StoreLog

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")


class BlackBox:
    """The file that faulthandler writes if this process aborts.

    Where the program uses faulthandler already, as torchrun's `record` decorator does, it writes here meanwhile, and to
    stderr afterwards: Python does not expose where it wrote before.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._was_enabled = False

    @property
    def path(self) -> str:
        """Path of the file, empty when there is none."""
        return self._file.name if self._file else ""

    def open(self) -> None:
        """Enable faulthandler, so that a fatal signal writes the stacks."""
        self._was_enabled = faulthandler.is_enabled()
        name = f"tpcompile-{os.getpid()}-"
        self._file = tempfile.NamedTemporaryFile("w", prefix=name, suffix=".stacks", delete=False)  # noqa: SIM115
        faulthandler.enable(self._file, all_threads=True)

    def close(self) -> None:
        """Disable faulthandler, or leave it enabled as it was, and remove the file."""
        if self._file is None:
            return
        faulthandler.disable()
        if self._was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__, all_threads=True)
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)
        self._file = None


def absences(log: StoreLog, ranks: Collection[int]) -> dict[int, Absence]:
    """What is known about the processes of ranks that do not answer."""
    return {rank: absence_of(log.process_of(rank)) for rank in sorted(ranks)}


def absence_of(process: Process) -> Absence:
    """What is known about a rank that does not answer, from the process it registered."""
    how = process.state()
    if how != "dead":
        return Absence(how)
    path = process.black_box
    return Absence(how, last_stack(path, process.main_thread), has_aborted(path))


def forget(path: str) -> None:
    """Remove the file of a process that has ended."""
    if path:
        Path(path).unlink(missing_ok=True)


def has_aborted(path: str) -> bool:
    """True when the process that left `path` ended by SIGABRT, not by a segmentation fault or a different crash."""
    return _text(path).startswith("Fatal Python error: Aborted")


def last_stack(path: str, ident: int) -> tuple[UserLine, ...]:
    """The user's frames of thread `ident`, outermost first, that an aborted process left at `path`."""
    frames: list[UserLine | None] = []
    is_wanted = False
    text = _text(path)
    for text_line in text.splitlines():
        thread = _THREAD.match(text_line)
        if thread:
            is_wanted = int(thread["ident"], 16) == ident
        elif is_wanted:
            frames.append(_frame(text_line))
    return tuple(reversed(known(frames)))


def _text(path: str) -> str:
    """Content of the file, empty when it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _frame(text_line: str) -> UserLine | None:
    frame = _FRAME.match(text_line)
    return flight.user_line(frame["file"], int(frame["line"]), frame["function"]) if frame else None
