"""The job's event log -> events of the protocol, on a thread that blocks on the next entry."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tpcompile.sentinel.events import (
    AlarmHeard,
    Asked,
    Decided,
    Event,
    Failed,
    PeerCompiled,
    PeerFailed,
    PeerPassed,
    PeersLeft,
    RecallAsked,
)
from tpcompile.sentinel.log_entries import (
    Ask,
    AskValues,
    CompileBegins,
    Degraded,
    Entry,
    Left,
    Passed,
    Raised,
    Settled,
)
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.store_log import StoreLog

_CLOSE_S = 10.0


class Listener:
    """Reads every entry from the first to this rank's own `left`."""

    def __init__(self, log: StoreLog, on: Callable[[Event], None]) -> None:
        self._log, self._on = log, on
        self._thread = threading.Thread(target=self._run, name="tpcompile-sentinel", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    @property
    def has_started(self) -> bool:
        """True from `start` on."""
        return self._thread.ident is not None

    def has_ended(self, timeout_s: float) -> bool:
        """True when the thread has ended, or ends in that time."""
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Wait for the thread, which ends at this rank's `left` entry or when the store cannot be reached."""
        self.has_ended(_CLOSE_S)

    def _run(self) -> None:
        try:
            for entry in self._log.entries():
                if not isinstance(entry, Left):
                    self._on(_EVENTS[type(entry)](entry))
                    continue
                left = self._log.left(entry)
                self._on(PeersLeft(left))
                if self._log.rank in left:
                    return
        except RuntimeError as error:
            self._on(Failed(f"the job's store cannot be reached: {error}"))
        except Exception as error:  # a thread that ends silently would leave the other ranks waiting for answers
            logger.error("rank {}: the sentinel failed", self._log.rank, exception=error)
            self._on(Failed(f"{type(error).__name__}: {error}"))
        finally:
            self._log.close_client()


_EVENTS: dict[type[Entry], Callable[[Any], Event]] = {
    CompileBegins: lambda entry: PeerCompiled(entry.announcement),
    Passed: lambda entry: PeerPassed(entry.position, entry.state),
    Settled: lambda entry: Decided(entry.position),
    Ask: lambda entry: Asked(entry.rank, entry.number),
    AskValues: lambda entry: RecallAsked(entry.number, entry.span),
    Raised: lambda entry: AlarmHeard(entry.alarm),
    Degraded: lambda entry: PeerFailed(entry.why),
}
"""Kind of an entry -> the event."""
