"""One TORCH_TRACE file -> its records, each with its place in the file; a damaged record is counted, never raised."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tpcompile.evidence.trace import RESERVED, WANTED_EVENTS, TraceEvent, event

SCHEDULE, EXECUTION, TORCH_VERSION = "inductor_collective_schedule", "graph_execution", "torch_version"
BACKWARD_METRICS = "bwd_compilation_metrics"
FILE_EVENTS = WANTED_EVENTS | {SCHEDULE, EXECUTION, TORCH_VERSION, BACKWARD_METRICS}
"""What a file is read for. Most of a real log (timings, config dumps, the graphs between two passes) is not in it."""

_HEAD = re.compile(
    rb'^[A-Z](?P<time>\d{4} [\d:.]+) \d+ .*?\] (?P<json>\{"(?P<name>\w+)"(?:: \{"name": "(?P<artifact>[^"]*)")?)'
)
_TAB = 9


@dataclass(frozen=True, slots=True)
class Record:
    """One record whose event is read: what torch logged, and the byte at which it starts."""

    start: int
    metadata: Mapping[str, Any]
    payload: bytes

    @property
    def event(self) -> TraceEvent | None:
        """The event of this record."""
        text = self.payload.decode(errors="replace") if self.payload else ""
        return event(self.metadata, text, wanted=FILE_EVENTS)


@dataclass(slots=True)
class FileFacts:
    """What a file says besides its records; complete once they were all read."""

    started: str = ""
    """Time of the first record as torch writes it, `MMDD hh:mm:ss.ffffff`."""
    ended: str = ""
    num_records: int = 0
    num_damaged: int = 0
    """Records that are no JSON, or nested deeper than a parser goes."""
    is_cut: bool = False
    """True when the file is empty or ends inside a record, as that of a killed process may; the record is left out."""


class TraceFile:
    """Records of one file, in order, in one pass; `facts` is complete at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = FileFacts()

    def records(self) -> Iterator[Record]:
        """Every record whose event is read. Raises OSError."""
        pending: _Pending | None = None
        place = last_start = 0
        with self.path.open("rb") as file:
            for line in file:
                if line[0] == _TAB:
                    if pending is not None:
                        pending.payload.append(line[1:])
                elif (head := _HEAD.match(line)) is not None:
                    yield from self._finished(pending)
                    pending = self._begun(head, line, place)
                    last_start = place
                place += len(line)
            self.facts.is_cut = not (self.facts.num_records and _is_whole_at(file, last_start))
        if not self.facts.is_cut:
            yield from self._finished(pending)

    def _begun(self, head: re.Match[bytes], line: bytes, place: int) -> _Pending | None:
        facts = self.facts
        facts.num_records += 1
        facts.ended = head["time"].decode()
        facts.started = facts.started or facts.ended
        if not _is_read(head):
            return None
        metadata = _metadata(line[head.start("json") :])
        if metadata is None:
            facts.num_damaged += 1
            return None
        return _Pending(place, metadata, [])

    @staticmethod
    def _finished(pending: _Pending | None) -> Iterator[Record]:
        if pending is not None:
            yield Record(pending.start, pending.metadata, pending.text)


@dataclass(slots=True)
class _Pending:
    """A record whose payload is being read."""

    start: int
    metadata: Mapping[str, Any]
    payload: list[bytes]

    @property
    def text(self) -> bytes:
        return b"".join(self.payload).removesuffix(b"\n")


def _is_read(head: re.Match[bytes]) -> bool:
    name = head["name"].decode()
    if name in RESERVED:
        return True  # some other order of keys: the parser will tell
    if name == "artifact" and head["artifact"] is not None:
        name = head["artifact"].decode(errors="replace")
    return name in FILE_EVENTS or name == "artifact"


def _metadata(text: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def read_trace_file(path: Path) -> Iterator[TraceEvent]:
    """Events of one TORCH_TRACE file, in order. A last event cut off by a killed process is skipped."""
    for record in TraceFile(path).records():
        if (found := record.event) is not None:
            yield found


def events_at(path: Path, places: Iterable[int]) -> Iterator[TraceEvent]:
    """The events that start at these bytes of a file that was read before."""
    with path.open("rb") as file:
        for place in places:
            if (found := _record_at(file, place).event) is not None:
                yield found


def _record_at(file: BinaryIO, place: int) -> Record:
    """Read the record that starts there; its metadata is empty when they are no JSON."""
    file.seek(place)
    line = file.readline()
    head = _HEAD.match(line)
    metadata = _metadata(line[head.start("json") :]) if head else None
    payload = []
    for line_after in file:
        if line_after[0] != _TAB:
            break
        payload.append(line_after[1:])
    return Record(place, metadata or {}, b"".join(payload).removesuffix(b"\n"))


def _is_whole_at(file: BinaryIO, place: int) -> bool:
    """False when a payload is not the one torch hashed: half a graph would look like another graph."""
    record = _record_at(file, place)
    said = record.metadata.get("has_payload")
    if not record.metadata or said is None:
        return bool(record.metadata)
    return bool(said == hashlib.md5(record.payload, usedforsecurity=False).hexdigest()) or _is_json(record.payload)


def _is_json(payload: bytes) -> bool:
    """A JSON payload that ends is whole, whatever it was edited to."""
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return True
