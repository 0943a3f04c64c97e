"""The job's event log -> events of the protocol, on a thread that blocks on the next entry."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
        """Wait for the thread, which ends at this rank's `left` entry or when the store is gone."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        try:
            for entry in self._log.entries():
                self._heard(entry)
                if entry.kind == "left" and entry.rank == self._log.rank:
                    return
        except RuntimeError as error:
            self._on(Failed(f"the job's store is gone: {error}"))
        except Exception as error:  # a thread that dies silently would leave the others waiting for answers
            logger.error("rank {}: the sentinel failed", self._log.rank, exception=error)
            self._on(Failed(f"{type(error).__name__}: {error}"))
        finally:
            self._log.close_client()

    def _heard(self, entry: Entry) -> None:
        self._on(event_of(entry))


def event_of(entry: Entry) -> Event:
    """What an entry of the log says."""
    data = entry.data
    if entry.kind == COMPILES:
        return PeerCompiled(Announcement.model_validate(data["announcement"]))
    if entry.kind == PASSED:
        return PeerPassed(Position.model_validate(data["position"]), RankState.model_validate(data["state"]))
    if entry.kind == DECIDED:
        return Decided(Position.model_validate(data["position"]))
    if entry.kind == "ask":
        return Asked(entry.rank, int(data["ask"]))
    if entry.kind == "left":
        return PeerLeft(RankState.model_validate(data["state"]))
    if entry.kind == "alarm":
        return AlarmHeard(Alarm.model_validate(data))
    return PeerFailed(str(data["why"]))
