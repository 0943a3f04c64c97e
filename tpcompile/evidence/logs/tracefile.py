"""One TORCH_TRACE file -> its records, each with its place in the file and what is wrong with it; nothing is raised.

torch hashes every payload and writes the hash beside it, so a payload is the one that was written, or it is damaged.
The line of JSON before it has no hash: it is read with the types that torch gives its fields, and `compiles.story`
compares it with the other records of its compile.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from tpcompile.evidence.compiles.events import RESERVED, TraceEvent, event
from tpcompile.evidence.compiles.shapes import FILE_EVENTS, is_as_written, json_object

_READ = frozenset(name.encode() for name in FILE_EVENTS | RESERVED | {"artifact"})
"""First keys of the records that are parsed; of one whose keys are in a different order the parser decides."""

_HEAD = re.compile(
    rb'[A-Z](?P<time>\d{4} [\d:.]+) \d+ .*?\] (?P<json>\{"(?:artifact": \{"name": ")?(?P<name>[^"\n]+)")'
)
_NEXT = re.compile(rb'\n(?=[A-Z]\d{4} [\d:.]+ \d+ .*?\] \{"[^"\n]+")')
_SAID = re.compile(rb'"has_payload": "([0-9a-f]{32})"\}\Z')
"""The hash of the payload, which torch adds as the last key."""
_FOREIGN = re.compile(rb"\n(?!\t)")
"""The end of a line of a record whose next line is none of it: torch begins all lines of a payload with a tab."""
_BLOCK_BYTES = 1 << 16
_RECORD_BYTES = 1 << 11
"""Read first of a record whose place is known."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record whose event is read: what torch logged, and the byte at which it starts."""

    start: int
    metadata: Mapping[str, Any]
    payload: bytes
    time: bytes = b""
    """Time of the record, `MMDD hh:mm:ss.ffffff`."""
    line: bytes = b""
    """Its JSON as it was written."""
    is_damaged: bool = False
    """True when it is not what torch wrote. Its compile id, if it has one, may be wrong too."""

    @property
    def event(self) -> TraceEvent | None:
        """The event of this record."""
        return event(self.metadata, self.payload.decode(errors="replace"), wanted=FILE_EVENTS)


@dataclass(slots=True)
class FileFacts:
    """What a file says besides its records; complete once they were all read."""

    time: bytes = b""
    """Time of the last record as torch writes it, `MMDD hh:mm:ss.ffffff`."""
    num_records: int = 0
    num_damaged: int = 0
    """Records that are not as torch wrote them: no JSON, a payload with a different hash, a field of a wrong type, a
    different rank."""
    is_cut: bool = True
    """True when the file is empty or ends inside a record, as that of a killed process may; the record is left out."""


@dataclass(slots=True)
class _Moment:
    """JSON of the records with one timestamp: the same line again is a record that was written twice."""

    time: bytes = b""
    lines: set[bytes] = field(default_factory=set)

    def has(self, time: bytes, line: bytes) -> bool:
        """True when the record was read before; it is noted."""
        if time != self.time:
            self.time, self.lines = time, set()
        is_known = line in self.lines
        self.lines.add(line)
        return is_known


class TraceFile:
    """Records of one file, in order, in one pass; `facts` is complete at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = FileFacts()
        self._moment = _Moment()
        self._rank: object = None
        """What the first record with a rank says; the file may have been renamed."""

    def records(self) -> Iterator[Record]:
        """Every record whose event is read, and every damaged one. Raises OSError.

        A record that was written twice counts once.
        """
        last: Record | None = None
        with self.path.open("rb") as file:
            for place, text, is_complete in _texts(file):
                for record in _own_and_foreign(place, text):
                    if last is not None:
                        yield from self._known(last)
                    last = record
                self.facts.is_cut = not is_complete
        self.facts.is_cut |= last is None or last.is_damaged
        if last is not None and not self.facts.is_cut:
            yield from self._known(last)
        elif last is not None:
            self._count(last)

    def _known(self, record: Record) -> list[Record]:
        """The record when it is damaged, or has an event that is read and is not the same record again."""
        self._count(record)
        if record.is_damaged or self._is_foreign(record):
            self.facts.num_damaged += 1
            return [replace(record, is_damaged=True)]
        if record.metadata and not self._moment.has(record.time, record.line):
            return [record]
        return []

    def _is_foreign(self, record: Record) -> bool:
        """True for a record of a different rank than the first one."""
        rank = record.metadata.get("rank")
        if self._rank is None:
            self._rank = rank
        return rank not in (None, self._rank)

    def _count(self, record: Record) -> None:
        if record.time:
            self.facts.num_records += 1
            self.facts.time = record.time


def events_at(path: Path, places: Iterable[int]) -> Iterator[TraceEvent]:
    """The events that start at these bytes of a file that was read before."""
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            _, text, _ = next(_texts(file, _RECORD_BYTES))
            record, *_ = _own_and_foreign(place, text)
            found = record.event
            if found is not None:
                yield found


def _texts(file: BinaryIO, block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[int, bytes, bool]]:
    """(place, text, is its last line complete), from one record to the next; the file is read in blocks, since
    splitting all of it into lines is slow."""
    place, rest = file.tell(), b""
    while block := file.read(max(block_bytes, len(rest))):
        *whole, rest = _NEXT.split(rest + block)
        for text in whole:
            yield place, text, True
            place += len(text) + 1
    yield place, rest.removesuffix(b"\n"), rest.endswith(b"\n")


def _own_and_foreign(place: int, text: bytes) -> list[Record]:
    """The record; text behind it that is no line of it is a second, damaged record."""
    record = _read(place, text)
    own = text
    if record.is_damaged:
        own = _FOREIGN.split(text, maxsplit=1)[0]
    if len(own) == len(text):
        return [record]
    foreign = Record(place + len(own), {}, b"", is_damaged=True)
    return [_read(place, own), foreign]


def _read(place: int, text: bytes) -> Record:
    """A record; without metadata when its event is not read."""
    head = _HEAD.match(text)
    if head is None:  # what stands before the first record
        return Record(place, {}, b"", is_damaged=bool(text))
    line, payload = _parts(head)
    if head["name"] not in _READ:
        said = _SAID.search(line)
        is_whole = _is_hashed(payload, said[1].decode() if said else None)
        return Record(place, {}, b"", head["time"], is_damaged=not is_whole)
    metadata = json_object(line)
    is_whole = _is_hashed(payload, metadata.get("has_payload")) and is_as_written(metadata, payload or b"")
    return Record(place, metadata, payload or b"", head["time"], line, is_damaged=not is_whole)


def _parts(head: re.Match[bytes]) -> tuple[bytes, bytes | None]:
    """The line of JSON, and the payload without its tabs; None where there is none."""
    line, newline, rest = head.string[head.start("json") :].partition(b"\n")
    if not newline:
        return line, None
    return line, (newline + rest).replace(b"\n\t", b"\n")[1:]


def _is_hashed(payload: bytes | None, said: object) -> bool:
    """True for the payload that torch hashed, and for no payload where torch wrote none."""
    if payload is None or said is None:
        return payload is said
    return hashlib.md5(payload, usedforsecurity=False).hexdigest() == said
