"""How a watched process ends: an exception's traceback first, then everybody else.

torchrun ends a job as soon as one process has failed, and names the first one as the root cause. So a rank that raises
keeps its traceback (on disk, in torchrun's error file, and on stderr even where SIGTERM comes before Python prints it),
and its peers stay until that process has ended.
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
"""Until torchrun has noticed by itself that a process ended: it looks now and then, and dates by the second."""


class Shutdown:
    """Ends this process, at most once."""

    def __init__(self, *, last_act: Callable[[], None]) -> None:
        self._last_act = last_act
        self._traceback = ""
        self._error_id = 0
        self._unwinds = threading.Event()
        """Set when an exception has reached the end of the watched block."""
        self.is_raising = False
        """An exception is on its way through the program."""
        self.exit_code: int | None = None
        """Set when the ranks have settled that the job ends."""

    @property
    def unwinds(self) -> bool:
        """True while an exception ends this process, which says more than an exit of ours."""
        return self._unwinds.is_set()

    def raises(self, error: BaseException) -> str:
        """An exception leaves the watched block: keep its traceback, and return it."""
        self._traceback = "".join(traceback.format_exception(error))
        self._error_id = id(error)
        self.is_raising = True
        self._unwinds.set()
        return self._traceback

    @staticmethod
    def tell_launcher(error: BaseException) -> None:
        """Write torchrun's error file, as its `record` decorator does: its root cause has the traceback then."""
        with suppress(OSError):
            get_error_handler().record_exception(error)

    def leave(self, code: int) -> None:
        """End the process, whose main thread may sit in a collective that never ends; not while it raises."""
        if self.is_raising and self._unwinds.wait(_UNWINDING_S):
            return
        self._end(code)

    def terminated(self, code: int) -> None:
        """End the process because of a SIGTERM; a traceback that Python has not printed comes first."""
        is_printed = id(getattr(sys, "last_value", None)) == self._error_id
        if self._traceback and not is_printed:
            sys.stderr.write(self._traceback)
        self._end(code if self.exit_code is None else self.exit_code)

    def stay_for_sigterm(self, pipe: SigtermPipe) -> None:
        """After the block: the program may clean up for longer than torchrun waits before its exception is printed."""
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
    """Wait for the process of a rank that raised, so that torchrun sees that one end first; not for ever.

    Of a process on another host it is known only that it has closed its sentinel.
    """
    deadline = time.monotonic() + _PEERS_STAY_S
    while time.monotonic() < deadline:
        found = state()
        has_ended = found == "dead" or (found == "unknown" and has_closed())
        if has_ended:
            time.sleep(_NOTICED_S)
            return
        time.sleep(_POLL_S)
