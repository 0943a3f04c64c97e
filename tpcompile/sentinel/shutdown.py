"""How watched processes end: first the rank that raised, with its traceback, then its peers.

torchrun ends a job as soon as one process has failed, and names the first one as the root cause. So a rank that raises
keeps its traceback (on disk, in torchrun's error file, and on stderr even where SIGTERM comes before Python prints it),
and its peers wait until that process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from tpcompile.ranks.liveness import Liveness
from tpcompile.ranks.signals import SigtermPipe

_UNWINDING_S = 3.0
_POLL_S = 0.02
_PEERS_STAY_S = 10.0
_NOTICED_S = 1.0
"""Time in which torchrun notices that a process ended: it polls, and its timestamps are in seconds."""


class Shutdown:
    """Ends this process, at most once."""

    def __init__(self, *, last_act: Callable[[], None]) -> None:
        self._last_act = last_act
        self._traceback = ""
        self._error_id = 0
        self._unwinds = threading.Event()
        """Set when an exception has reached the end of the watched block."""
        self.is_raising = False
        """An exception propagates through the program."""
        self.exit_code: int | None = None
        """Set when the ranks have settled that the job ends."""

    @property
    def unwinds(self) -> bool:
        """True while an exception ends this process, which must not be replaced by an exit of the sentinel."""
        return self._unwinds.is_set()

    def raises(self, error: BaseException) -> str:
        """Record that an exception leaves the watched block; returns its traceback."""
        self._traceback = "".join(traceback.format_exception(error))
        self._error_id = id(error)
        self.is_raising = True
        self._unwinds.set()
        return self._traceback

    @staticmethod
    def tell_launcher(error: BaseException) -> None:
        """Write torchrun's error file as its `record` decorator does, so that its root cause has this error."""
        tb = error.__traceback__
        try:
            raise error  # torch writes the exception that is being handled
        except BaseException:
            error.__traceback__ = tb
            with suppress(OSError):
                get_error_handler().record_exception(error)

    def leave(self, code: int) -> None:
        """End the process, whose main thread may be stuck in a collective; not while an exception ends it."""
        if self.is_raising and self._unwinds.wait(_UNWINDING_S):
            return
        self._end(code)

    def terminated(self, code: int) -> None:
        """End the process after a SIGTERM; prints the traceback first if Python has not."""
        is_printed = id(getattr(sys, "last_value", None)) == self._error_id
        if self._traceback and not is_printed:
            sys.stderr.write(self._traceback)
        self._end(code if self.exit_code is None else self.exit_code)

    def stay_for_sigterm(self, pipe: SigtermPipe) -> None:
        """Handle SIGTERM after the block: clean-up may take longer than torchrun waits for the traceback."""
        if not pipe.is_installed:
            return
        reader = threading.Thread(target=self._wait_for_sigterm, args=(pipe,), name="tpcompile-last-words", daemon=True)
        pipe.hand_to(reader)
        reader.start()

    def _wait_for_sigterm(self, pipe: SigtermPipe) -> None:
        while not pipe.terminated(timeout_s=60.0):
            pass
        self.terminated(128 + signal.SIGTERM)

    def _end(self, code: int) -> None:
        self._last_act()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def stay_until_gone(state: Callable[[], Liveness], has_closed: Callable[[], bool]) -> None:
    """Wait, with a timeout, for the process of a rank that raised, so that torchrun sees it end first.

    For a process on a different host it is only known that it has closed its sentinel.
    """
    deadline = time.monotonic() + _PEERS_STAY_S
    while time.monotonic() < deadline:
        found = state()
        has_ended = found == "dead" or (found == "unknown" and has_closed())
        if has_ended:
            time.sleep(_NOTICED_S)
            return
        time.sleep(_POLL_S)
