"""What each rank did -> a trace for ui.perfetto.dev, one process per rank."""

from __future__ import annotations

import json

from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.report.page.evidence import Evidence, since_first

_US = 1e6
"""Microseconds in a second; of a run without a clock each event is a second long."""


def trace(evidence: Evidence) -> str:
    """JSON in the trace event format (Chromium's), which Perfetto reads; microseconds since the first event."""
    found: list[dict[str, object]] = []
    for rank, events in since_first(evidence.events).items():
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": named_ranks([rank])}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for event in events:
            about = {"what": event.detail, "line": str(event.line or "")}
            found.append(
                {
                    "ph": "X",
                    "name": event.label,
                    "cat": event.kind,
                    "pid": rank,
                    "tid": 0,
                    "ts": round(event.start * _US, 3),
                    "dur": round((event.end - event.start) * _US, 3),
                    "args": {name: text for name, text in about.items() if text},
                }
            )
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})
