"""A mapped file that one process fills with the lines it executes, and that any process of this user can read.

The kernel keeps what is in it whatever ends the process, SIGKILL and abort() among them.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tpcompile.errors import PreflightError
from tpcompile.evidence.timeline.flow import ENTRY, HEADER, SETUP, SETUP_BYTES, TABLE_BYTES, Flow, Set, flow_of
from tpcompile.private_folder import shared_folder

_CAPACITY = 1 << 17
"""Entries, of which the newest are kept."""
_BEFORE_BYTES = 1 << 18
"""Room for what was set before the recording."""
_OLD_S = 24 * 3600.0


class Ring:
    """The ring of this process. Raises PreflightError or OSError without a private folder, or room for it."""

    def __init__(self, name: str) -> None:
        if not name:
            raise PreflightError("there is no private folder")
        self.path = _path(name)
        now_s = time.time()  # rings of killed jobs that no process read are removed after a day
        for path in self.path.parent.glob("*.ring"):
            with suppress(OSError):
                if now_s - path.stat().st_mtime > _OLD_S:
                    path.unlink()
        size = _size()
        with self.path.open("x+b") as file:
            try:
                # Room for all of it now: a write into a mapped file that has none ends the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
                self.map = mmap.mmap(file.fileno(), size)
            except OSError:
                self.path.unlink()
                raise
        self._table_bytes, self._num_codes = 0, 0
        self.map[: HEADER.size] = HEADER.pack(0, _CAPACITY, 0, 0, 0)

    def number_of(self, file: str, function: str, line: int, names: Sequence[str] = ()) -> int | None:
        """The number of a code that is not in the table yet; None when the table is full."""
        row = json.dumps([file, function, line, *names]).encode() + b"\n"
        if self._table_bytes + len(row) > TABLE_BYTES:
            return None
        start = HEADER.size + _CAPACITY * ENTRY.size + self._table_bytes
        self.map[start : start + len(row)] = row
        self._table_bytes += len(row)
        self.map[16:24] = self._table_bytes.to_bytes(8, "little")  # last: a reader finds whole rows
        self._num_codes += 1
        return self._num_codes - 1

    def keep_before(self, rows: Sequence[Set]) -> None:
        """Keep what was set before, as far as there is room."""
        data = b""
        for row in rows:
            line = json.dumps([row.file, row.function, row.line, row.name, row.value, row.own]).encode() + b"\n"
            if len(data) + len(line) > _BEFORE_BYTES:
                break
            data += line
        start = _size() - _BEFORE_BYTES
        self.map[start : start + len(data)] = data
        self.map[24:32] = len(data).to_bytes(8, "little")

    def go_on(self, name: str) -> None:
        """Be the ring of that name, and keep the first steps so far for as long as it is there."""
        path = _path(name)
        self.path.rename(path)
        self.path = path
        num_kept = min(self.num_recorded, SETUP) if self.num_recorded <= _CAPACITY else 0
        start = _size() - _BEFORE_BYTES - SETUP_BYTES
        self.map[start : start + num_kept * ENTRY.size] = self.map[HEADER.size : HEADER.size + num_kept * ENTRY.size]
        self.map[32:40] = num_kept.to_bytes(8, "little")

    @property
    def num_recorded(self) -> int:
        """Steps so far, kept or not."""
        return int.from_bytes(self.map[:8], "little")

    def flow(self) -> Flow | None:
        """What it holds."""
        return flow_of(self.map)

    def close(self) -> None:
        """Remove the file."""
        with suppress(BufferError):  # a callback of sys.monitoring still writes
            self.map.close()
        self.path.unlink(missing_ok=True)


def flow_left(name: str) -> Flow | None:
    """The flow of a process of this host, alive or dead; None when it left none that can be read."""
    if not name:
        return None
    try:
        with _path(name).open("rb") as file:
            return flow_of(file.read(_size()))
    except (OSError, PreflightError):
        return None


def forget_ring(name: str) -> None:
    """Remove the ring of a process that has ended."""
    if name:
        with suppress(OSError, PreflightError):
            _path(name).unlink()


def _size() -> int:
    return HEADER.size + _CAPACITY * ENTRY.size + TABLE_BYTES + SETUP_BYTES + _BEFORE_BYTES


def _path(name: str) -> Path:
    return shared_folder("rings") / f"{name}.ring"
