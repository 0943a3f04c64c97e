"""The callbacks that append to a ring: in C, built once into a private folder, or in Python without a compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, ModuleType
from typing import Any

from tpcompile.errors import PreflightError
from tpcompile.evidence.timeline.flow import ENTRY, HEADER, Kind
from tpcompile.private_folder import cache_folder

_SOURCE = Path(__file__).with_name("flow.c")


class InPython:
    """What flow.c does, for machines without a compiler."""

    def attach(
        self, buffer: Any, disable: Any, restart: Any, is_followed: Any, first_start: Any, budget: int, often: int
    ) -> None:
        self._map, self._disable, self._restart = buffer, disable, restart
        self._is_followed, self._first_start = is_followed, first_start
        self._budget, self._often = budget, often
        self._codes: dict[int, tuple[CodeType, int]] = {}
        self._head, self._capacity = HEADER.unpack_from(buffer)[:2]
        self._is_paused = False
        self._second, self._in_second, self._has_disabled = 0, 0, False
        self._times: dict[tuple[int, int], int] = {}

    def detach(self) -> None:
        self._codes, self._is_paused = {}, True

    def add(self, code: CodeType, number: int) -> None:
        self._codes.setdefault(id(code), (code, number))

    def knows(self, code: CodeType) -> bool:
        return id(code) in self._codes

    def mark(self, number: int, call: int) -> None:
        if not self._is_paused:
            self._append(time.time_ns(), number, Kind.MARK, call)

    def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def on_start(self, code: CodeType, _offset: int) -> Any:
        if id(code) not in self._codes and self._first_start(code) is self._disable:
            return self._disable
        return self._on_event(code, Kind.START, code.co_firstlineno)

    def on_line(self, code: CodeType, line: int) -> Any:
        return self._on_event(code, Kind.LINE, line)

    def on_return(self, code: CodeType, _offset: int, _value: Any) -> Any:
        return self._on_event(code, Kind.RETURN, 0)

    def _on_event(self, code: CodeType, kind: Kind, line: int) -> Any:
        found = self._codes.get(id(code))
        if self._is_paused or found is None or not self._is_followed(threading.get_ident()):
            return None
        ns = time.time_ns()
        if ns // 1_000_000_000 != self._second:
            self._second, self._in_second = ns // 1_000_000_000, 0
            self._times.clear()
            if self._has_disabled:
                self._has_disabled = False
                self._restart()
        self._append(ns, found[1], kind, line)
        times = self._times[found[1], line] = self._times.get((found[1], line), 0) + 1
        self._in_second += 1
        if self._in_second > self._budget and times > self._often:
            self._has_disabled = True
            self._append(ns, found[1], Kind.MARK, 0)
            return self._disable
        return None

    def _append(self, ns: int, number: int, kind: Kind, line: int) -> None:
        at = HEADER.size + self._head % self._capacity * ENTRY.size
        ENTRY.pack_into(self._map, at, ns, number, kind << 30 | line)
        self._head += 1
        self._map[:8] = self._head.to_bytes(8, "little")


@cache
def compiled() -> ModuleType | None:
    """The callbacks in C, a module like `InPython`; None where they cannot be built."""
    try:
        library = _library()
        if not library.exists():
            with TemporaryDirectory(dir=library.parent) as partial:
                built = Path(partial, library.name)
                _build(built)
                built.replace(library)  # a process that loads it meanwhile finds all of it
        spec = importlib.util.spec_from_file_location("tpcompile_flow", library)
        if spec is None or spec.loader is None:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, PreflightError, ImportError, subprocess.SubprocessError):
        return None
    return module


def _library() -> Path:
    content = f"{sys.version} {sysconfig.get_config_var('EXT_SUFFIX')} {_SOURCE.read_text()}"
    return cache_folder("flow") / f"tpcompile_flow_{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"


def _build(library: Path) -> None:
    compiler = (os.environ.get("CC") or "cc").split()
    include = f"-I{sysconfig.get_path('include')}"
    command = [*compiler, "-O2", "-shared", "-fPIC", include, str(_SOURCE), "-o", str(library)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
