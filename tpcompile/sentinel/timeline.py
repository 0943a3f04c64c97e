"""Events on this rank -> a list with Unix times, for the run directory."""

from __future__ import annotations

import time
from enum import StrEnum


class TimelineEvent(StrEnum):
    """What happened on a rank."""

    COMPILE_STARTS = "compile starts"
    COMPILE_ENDS = "compile ends"
    ALARM = "alarm"
    VERDICT = "verdict"


class Timeline:
    """Events on this rank, with Unix times."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str, str]] = []
        """(Unix time, event, compile id); the id is empty for an event that is not about one compile."""

    def note(self, event: TimelineEvent, compile_id: str = "") -> None:
        """Add an entry with the current time."""
        self.entries.append((time.time(), event.value, compile_id))
