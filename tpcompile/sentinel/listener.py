"""The job's event log -> events of the protocol, on a thread that blocks on the next entry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tpcompile.sentinel.events import (
    Alarm,
    AlarmHeard,
    Asked,
    Decided,
    Event,
    Failed,
    PeerCompiled,
    PeerFailed,
    PeerLeft,
    PeerPassed,
)
from tpcompile.sentinel.messages import Announcement, Entry, Position, RankState
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.store_log import COMPILES, DECIDED, PASSED, StoreLog

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

    def close(self) -> None:
        """Wait for the thread, which ends at this rank's `left` entry or when the store cannot be reached."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        try:
            for entry in self._log.entries():
                self._heard(entry)
                if entry.kind == "left" and entry.rank == self._log.rank:
                    return
        except RuntimeError as error:
            self._on(Failed(f"the job's store cannot be reached: {error}"))
        except Exception as error:  # a thread that ends silently would leave the other ranks waiting for answers
            logger.error("rank {}: the sentinel failed", self._log.rank, exception=error)
            self._on(Failed(f"{type(error).__name__}: {error}"))
        finally:
            self._log.close_client()

    def _heard(self, entry: Entry) -> None:
        self._on(event_of(entry))


def event_of(entry: Entry) -> Event:
    """The event of an entry of the log."""
    return _EVENTS[entry.kind](entry.rank, entry.data)


def _position(data: Mapping[str, Any]) -> Position:
    return Position.model_validate(data["position"])


def _state(data: Mapping[str, Any]) -> RankState:
    return RankState.model_validate(data["state"])


_EVENTS: dict[str, Callable[[int, Mapping[str, Any]], Event]] = {
    COMPILES: lambda _, data: PeerCompiled(Announcement.model_validate(data["announcement"])),
    PASSED: lambda _, data: PeerPassed(_position(data), _state(data)),
    DECIDED: lambda _, data: Decided(_position(data)),
    "ask": lambda rank, data: Asked(rank, int(data["ask"])),
    "left": lambda _, data: PeerLeft(_state(data)),
    "alarm": lambda _, data: AlarmHeard(Alarm.model_validate(data)),
    "degraded": lambda _, data: PeerFailed(str(data["why"])),
}
"""Kind of an entry -> (its rank, its data) -> the event."""
