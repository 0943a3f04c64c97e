"""One TORCH_TRACE file -> its records, each with its place in the file; a damaged record is counted, never raised."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tpcompile.evidence.compiles.trace import RESERVED, WANTED_EVENTS, TraceEvent, event

SCHEDULE, EXECUTION, TORCH_VERSION = "inductor_collective_schedule", "graph_execution", "torch_version"
BACKWARD_METRICS = "bwd_compilation_metrics"
FILE_EVENTS = WANTED_EVENTS | {SCHEDULE, EXECUTION, TORCH_VERSION, BACKWARD_METRICS}
"""What a file is read for. Most of a real log (timings, config dumps, the graphs between two passes) is not in it."""

_READ = frozenset(name.encode() for name in FILE_EVENTS | RESERVED | {"artifact"})
"""First keys of the records that are parsed; of one whose keys are in a different order the parser decides."""

_HEAD = re.compile(
    rb'[A-Z](?P<time>\d{4} [\d:.]+) \d+ .*?\] (?P<json>\{"(?:artifact": \{"name": ")?(?P<name>[^"\n]+)")'
)
_NEXT = re.compile(rb'\n(?=[A-Z]\d{4} [\d:.]+ \d+ .*?\] \{"[^"\n]+")')
_PAYLOAD_LINE = re.compile(rb"^\t(.*)", re.MULTILINE)
_BLOCK_BYTES = 1 << 16
_RECORD_BYTES = 1 << 11
"""Read first of a record whose place is known."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record whose event is read: what torch logged, and the byte at which it starts."""

    start: int
    metadata: Mapping[str, Any]
    payload: bytes

    @property
    def event(self) -> TraceEvent | None:
        """The event of this record."""
        return event(self.metadata, self.payload.decode(errors="replace"), wanted=FILE_EVENTS)

    @property
    def bare_event(self) -> TraceEvent | None:
        """The event without its text, which most uses do not need and which takes long to decode."""
        return event(self.metadata, None, wanted=FILE_EVENTS)


@dataclass(slots=True)
class FileFacts:
    """What a file says besides its records; complete once they were all read."""

    time: bytes = b""
    """Time of the last record as torch writes it, `MMDD hh:mm:ss.ffffff`."""
    num_records: int = 0
    num_damaged: int = 0
    """Records that are not JSON, or nested too deeply to parse."""
    is_cut: bool = False
    """True when the file is empty or ends inside a record, as that of a killed process may; the record is left out."""

    @property
    def ended(self) -> str:
        """Time of the last record, as text."""
        return self.time.decode()


class TraceFile:
    """Records of one file, in order, in one pass; `facts` is complete at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = FileFacts()

    def records(self) -> Iterator[Record]:
        """Every record whose event is read. Raises OSError."""
        before: list[Record] = []
        last = Record(0, {}, b"")
        with self.path.open("rb") as file:
            for place, head in _heads(file):
                yield from before  # a record follows, so this one is whole
                before = self._read(place, head)
            if self.facts.num_records:
                last = _record(place, head)
        self.facts.is_cut = not _is_whole(last)
        if not self.facts.is_cut:
            yield from before

    def _read(self, place: int, head: re.Match[bytes]) -> list[Record]:
        """The record when its event is read and it is not damaged."""
        self.facts.num_records += 1
        self.facts.time = head["time"]
        if head["name"] not in _READ:
            return []
        record = _record(place, head)
        if not record.metadata:
            self.facts.num_damaged += 1
            return []
        return [record]


def events_at(path: Path, places: Iterable[int]) -> Iterator[TraceEvent]:
    """The events that start at these bytes of a file that was read before."""
    with path.open("rb") as file:
        yield from _events(_record_at(file, place) for place in places)


def _events(records: Iterable[Record]) -> Iterator[TraceEvent]:
    for record in records:
        if (found := record.event) is not None:
            yield found


def _record_at(file: BinaryIO, place: int) -> Record:
    file.seek(place)
    text = b""
    while block := file.read(max(_RECORD_BYTES, len(text))):
        text += block
        end = _NEXT.search(text)
        if end is not None:  # most records are far smaller than the blocks of a whole pass
            text = text[: end.start()]
            break
    head = _HEAD.match(text)
    assert head is not None, "a record was read there before"
    return _record(place, head)


def _heads(file: BinaryIO) -> Iterator[tuple[int, re.Match[bytes]]]:
    """(place, head) of every record from the file's position on; the string of a head is the whole record."""
    place = file.tell()
    for text in _texts(file):
        head = _HEAD.match(text)
        if head is not None:  # else what stands before the first record
            yield place, head
        place += len(text) + 1


def _texts(file: BinaryIO) -> Iterator[bytes]:
    """The text of each record; the file is read in blocks, since splitting all of it into lines is slow."""
    rest = b""
    while block := file.read(max(_BLOCK_BYTES, len(rest))):
        *whole, rest = _NEXT.split(rest + block)
        yield from whole
    yield rest


def _record(place: int, head: re.Match[bytes]) -> Record:
    line, _, rest = head.string[head.start("json") :].partition(b"\n")
    payload = b"\n".join(_PAYLOAD_LINE.findall(rest))
    return Record(place, json_object(line), payload)


def _is_whole(record: Record) -> bool:
    """False when a payload is not the one that torch hashed: half a graph would look like a different graph."""
    said = record.metadata.get("has_payload")
    if said is None:
        return bool(record.metadata)
    payload_md5 = hashlib.md5(record.payload, usedforsecurity=False).hexdigest()
    if said == payload_md5:
        return True
    return json_value(record.payload) is not None  # valid JSON is whole, even if it was edited


def json_value(text: str | bytes) -> Any | None:
    """The value of JSON text; None for text that is not JSON, or is nested too deeply to parse."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        return None


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object in JSON text; empty for any other text."""
    value = json_value(text)
    return value if isinstance(value, dict) else {}
