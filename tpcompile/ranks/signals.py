"""SIGTERM -> a pipe that a thread reads: a main thread blocked in a collective never runs a Python signal handler."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any


class SigtermPipe:
    """Passes SIGTERM to one thread; call `install` and `restore` on the main thread, as Python's `signal` requires."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1
        self._handler: Any = signal.SIG_DFL
        self._reader: threading.Thread | None = None

    def install(self, reader: threading.Thread, *, over_a_handler: bool = False) -> None:
        """Pass SIGTERM to `reader`; does nothing off the main thread, nor over the program's handler by default."""
        handler = signal.getsignal(signal.SIGTERM)
        is_free = handler is signal.SIG_DFL or over_a_handler
        if not is_free or threading.current_thread() is not threading.main_thread():
            return
        self._reader, self._handler = reader, handler
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.signal(signal.SIGTERM, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    @property
    def is_installed(self) -> bool:
        """True while a SIGTERM arrives here."""
        return self._pipe is not None

    def hand_to(self, reader: threading.Thread | None) -> None:
        """Let a different thread read from now on; with None a SIGTERM has no effect until `restore`."""
        self._reader = reader

    def terminated(self, *, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a SIGTERM."""
        if self._pipe is None:
            time.sleep(timeout_s)
            return False
        ready, _, _ = select.select([self._pipe[0]], [], [], timeout_s)
        return bool(ready) and signal.SIGTERM in os.read(self._pipe[0], 64)

    def wake(self) -> None:
        """End the wait in `terminated` now, without a SIGTERM."""
        if self._pipe is not None:
            with suppress(BlockingIOError):  # it is full: nothing waits
                os.write(self._pipe[1], b"\0")

    def forget(self) -> None:
        """Detach a forked child, which would write its own SIGTERM into its parent's pipe."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._pipe = None

    def restore(self) -> None:
        """Restore the handler and the wakeup descriptor that `install` found."""
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGTERM, self._handler or signal.SIG_DFL)
        for end in self._pipe:
            os.close(end)
        self._pipe = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._reader is not None and not self._reader.is_alive():  # the pipe has no reader any more
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
