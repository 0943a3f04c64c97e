"""Structured-trace events, live or from a TORCH_TRACE file -> `CompileRecord`s.

The one parser of torch's structured trace. A live handler and a log file both give `TraceEvent`s; everything after
that is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.compiles.events import (
    CACHE_EVENTS,
    CALLED_FROM,
    GRAPH_KINDS,
    RANK_READS,
    RESERVED,
    TRACED,
    WANTED_EVENTS,
    TraceEvent,
    compile_id_of,
    event,
    event_beside,
)
from tpcompile.evidence.compiles.record import LoggedEvents, frame_line, start_stack
from tpcompile.evidence.records import CompileRecord
from tpcompile.evidence.text.breaks import parse_break
from tpcompile.evidence.text.normalise import GroupRoles

__all__ = [
    "CACHE_EVENTS",
    "CALLED_FROM",
    "GRAPH_KINDS",
    "RANK_READS",
    "RESERVED",
    "TRACED",
    "WANTED_EVENTS",
    "CompileNumbers",
    "TraceEvent",
    "compile_id_of",
    "compile_record",
    "compile_records",
    "event",
    "event_beside",
    "frame_line",
    "parse_break",
    "start_stack",
]


class CompileNumbers:
    """Assigns events of a rank to compiles: after torch.compiler.reset() compile ids begin again at 0/0."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._of_frame: dict[str, int] = {}
        self._names: list[set[str]] = []
        self.before: list[int | None] = []
        """By compile: the previous compile of the same frame."""

    def __call__(self, item: TraceEvent) -> int:
        """Number of the event's compile, from 0; a new compile gets the next number."""
        assert item.compile_id is not None, "only an event of a compile has a number"
        number = self._latest.get(item.compile_id)
        if number is None or self._is_again(item, self._names[number]):
            frame = item.compile_id.rpartition("/")[0]
            number = len(self._names)
            self.before.append(self._of_frame.get(frame))
            self._latest[item.compile_id] = self._of_frame[frame] = number
            self._names.append(set())
        self._names[number].add(item.name)
        return number

    @staticmethod
    def _is_again(item: TraceEvent, names: set[str]) -> bool:
        """True when an event begins a new compile with the same id; recompile reasons are logged before its start."""
        if item.name == "recompile_reasons":
            return "compilation_metrics" in names
        return item.name == "dynamo_start" and item.attempt == 0 and "dynamo_start" in names


def compile_records(
    events: Iterable[TraceEvent],
    *,
    roles: Mapping[str, str],
    strings: Mapping[int, str] | None = None,
) -> tuple[CompileRecord, ...]:
    """Events of one rank, in order -> its compiles, in order of their first event.

    `roles` maps process-group names to mesh roles; `strings` is the table of interned file names, for a live source
    that began to listen after torch had sent some of them.
    """
    table = dict(strings or {})
    compiles: list[LoggedEvents] = []
    number_of = CompileNumbers()
    for item in events:
        if item.name == "str":
            text, index = item.metadata["str"]
            table[int(index)] = str(text)
        elif item.compile_id is not None:
            number = number_of(item)
            if number == len(compiles):
                before = number_of.before[number]
                start = compiles[before].start if before is not None else None
                compiles.append(LoggedEvents(item.compile_id, start))
            compiles[number].events.append(item)
    group_roles = GroupRoles(roles)
    return tuple(compile_.record(group_roles, table, is_ended=False) for compile_ in compiles)


def compile_record(
    events: Sequence[TraceEvent], *, before: TraceEvent | None, roles: GroupRoles, strings: Mapping[int, str]
) -> CompileRecord:
    """Events of one compile in a finished log -> its record; `before` is the start of the frame's previous compile."""
    logged = LoggedEvents(str(events[0].compile_id), before, list(events))
    return logged.record(roles, strings, is_ended=True)
