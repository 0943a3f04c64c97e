"""A clock and SIGTERM -> events: the only thread of the sentinel that wakes up periodically."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tpcompile.ranks.signals import SigtermPipe
from tpcompile.sentinel.events import Event, Failed, Tick

_TICK_S = 0.2


class Timer:
    """Ticks while the sentinel watches; learns of SIGTERM through a pipe."""

    def __init__(
        self, on: Callable[[Event], None], *, terminated: Callable[[], None], ends: Callable[[], None]
    ) -> None:
        self._on, self._terminated, self._ends = on, terminated, ends
        self.signals = SigtermPipe()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpcompile-sentinel-timer", daemon=True)

    def start(self) -> None:
        """Start; on the main thread, since Python sets signal handlers only there."""
        self.signals.install(self._thread)
        self._thread.start()

    def close(self) -> None:
        """End the thread; signal handlers stay until `signals.restore`."""
        self._done.set()
        self.signals.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                if self.signals.terminated(timeout_s=_TICK_S):
                    self._terminated()
                self._on(Tick(time.monotonic()))
        except RuntimeError as error:
            if not self._done.is_set():
                self._on(Failed(f"the job's store cannot be reached: {error}"))
        finally:
            self._ends()
