"""Structured-trace events, live or from a TORCH_TRACE file -> `CompileRecord`s.

The one parser of torch's structured trace. A live handler and a log file both give `TraceEvent`s; everything after
that is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tpcompile.evidence.compiles.events import TraceEvent
from tpcompile.evidence.compiles.record import LoggedEvents
from tpcompile.evidence.records import CompileRecord
from tpcompile.evidence.text.normalise import GroupRoles


class CompileNumbers:
    """Assigns events of a rank to compiles: after torch.compiler.reset() compile ids begin again at 0/0."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._of_frame: dict[str, int] = {}
        self._names: list[set[str]] = []
        self.before: list[int | None] = []
        """Number of a compile -> number of the previous compile of the same frame, None for the first."""

    def __call__(self, item: TraceEvent) -> int:
        """Number of the event's compile, from 0; a new compile gets the next number."""
        assert item.compile_id is not None, "only an event of a compile has a number"
        number = self._latest.get(item.compile_id)
        is_new = True
        if number is not None:
            names = self._names[number]
            if item.name == "recompile_reasons":  # logged before the start of the compile
                is_new = "compilation_metrics" in names
            else:
                is_new = item.name == "dynamo_start" and item.attempt == 0 and "dynamo_start" in names
        if number is None or is_new:
            frame = item.compile_id.rpartition("/")[0]
            number = len(self._names)
            self.before.append(self._of_frame.get(frame))
            self._latest[item.compile_id] = self._of_frame[frame] = number
            self._names.append(set())
        self._names[number].add(item.name)
        return number


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
