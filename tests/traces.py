"""A TORCH_TRACE file of a test -> its events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tpcompile.evidence.compiles.events import TraceEvent
from tpcompile.evidence.logs.tracefile import TraceFile


def read_trace_file(path: Path) -> Iterator[TraceEvent]:
    """Events of one file, in order; the file is read to its end."""
    for record in TraceFile(path).records():
        event = record.event
        if event is not None:
            yield event
