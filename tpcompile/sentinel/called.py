"""What one rank called: the variants that ran and the counters, by region; and the difference to what it was before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from tpcompile.evidence.records import Frozen
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.variants import Ran, ran_by

Table = dict[str, JsonValue]
"""JSON of a `Called`, or of a part of it."""
_KEPT = 256
"""Calls of a region that a reader keeps of a rank, the first and the last ones: at least as many as that rank keeps."""
_MAX_NAMES = 4096
"""Names that a reader keeps of any other table: whatever a peer writes, memory is bounded."""


class Called(Frozen):
    """What one rank called, by region."""

    ran: dict[str, Ran] = {}
    """Which compiled variants it ran."""
    counted: dict[str, Counted] = {}
    """Its counters at selected calls."""

    @property
    def sha(self) -> str:
        """Hash of the variants."""
        text = self.model_dump_json(include={"ran"})
        return hashlib.sha256(text.encode()).hexdigest()


def called_by(progress: Progress, *, is_over: bool) -> Called:
    """What this rank called so far; may be called from any thread."""
    return Called(ran=ran_by(progress), counted=progress.counted(is_over=is_over))


def difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What is new or different in a table: of tables in it their differences. Nothing is ever removed from one."""
    news = {}
    for name, value in now.items():
        if value == before.get(name):
            continue
        was = before.get(name)
        news[name] = difference(value, was) if isinstance(value, dict) and isinstance(was, dict) else value
    return news


def merged(before: Mapping[str, Any], news: Mapping[str, Any]) -> dict[str, Any]:
    """The table of which `news` is the difference to `before`; of the calls of a region the first and the last ones."""
    table = dict(before)
    for name, value in news.items():
        was = table.get(name)
        if was is None and len(table) >= _MAX_NAMES:
            continue
        table[name] = merged(was, value) if isinstance(value, dict) and isinstance(was, dict) else value
    return _bounded(table)


def _bounded(table: dict[str, Any]) -> dict[str, Any]:
    if len(table) <= 2 * _KEPT or not all(map(str.isdecimal, table)):
        return table
    calls = sorted(table, key=int)
    return {call: table[call] for call in [*calls[:_KEPT], *calls[-_KEPT:]]}
