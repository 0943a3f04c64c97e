"""One TORCH_TRACE file -> its records, each with its place in the file and what is wrong with it; nothing is raised.

torch hashes every payload and writes the hash beside it, so a payload is the one that was written, or it is damaged.
The line of JSON before it has no hash: it is read with the types that torch gives its fields, and `compiles.story`
compares it with the other records of its compile.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tpcompile.evidence.compiles.shapes import FILE_EVENTS, is_as_written, json_object
from tpcompile.evidence.compiles.trace import RESERVED, TraceEvent, event

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


@dataclass(frozen=True, slots=True)
class Record:
    """One record whose event is read: what torch logged, and the byte at which it starts."""

    start: int
    metadata: Mapping[str, Any]
    payload: bytes
    time: bytes = b""
    """As torch writes it, `MMDD hh:mm:ss.ffffff`."""
    is_damaged: bool = False
    """True when it is not what torch wrote. Its compile id, if it has one, may be wrong too."""

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
    """Records that are not as torch wrote them: no JSON, a payload with a different hash, a field of a wrong type."""
    is_cut: bool = True
    """True when the file is empty or ends inside a record, as that of a killed process may; the record is left out."""

    @property
    def ended(self) -> str:
        """Time of the last record, as text."""
        return self.time.decode()


@dataclass(slots=True)
class _Moment:
    """Heads of the records of one timestamp: the same record twice is one that was written twice."""

    time: bytes = b""
    heads: set[bytes] = field(default_factory=set)

    def has(self, time: bytes, head: bytes) -> bool:
        """True when the record was read before; it is noted."""
        if time != self.time:
            self.time, self.heads = time, set()
        is_known = head in self.heads
        self.heads.add(head)
        return is_known


class TraceFile:
    """Records of one file, in order, in one pass; `facts` is complete at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = FileFacts()
        self._moment = _Moment()

    def records(self) -> Iterator[Record]:
        """Every record whose event is read, and every damaged one. Raises OSError.

        A record that was written twice counts once.
        """
        last: Record | None = None
        with self.path.open("rb") as file:
            for place, text, is_complete in _own_and_foreign(_texts(file)):
                if last is not None:
                    yield from self._known(last)
                last = self._read(place, text)
                self.facts.is_cut = last.is_damaged or not is_complete
        if last is not None and not self.facts.is_cut:
            yield from self._known(last)

    def _known(self, record: Record) -> list[Record]:
        """The record when it is damaged, or has an event that is read."""
        if record.is_damaged:
            self.facts.num_damaged += 1
        return [record] if record.is_damaged or record.metadata else []

    def _read(self, place: int, text: bytes) -> Record:
        """The record; without metadata when its event is not read, or when it was read before."""
        head = _HEAD.match(text)
        if head is None:  # what stands before the first record
            return Record(place, {}, b"", is_damaged=bool(text))
        self.facts.num_records += 1
        self.facts.time = head["time"]
        if head["name"] in _READ:
            record = _record(place, head)
            is_known = self._moment.has(record.time, text.partition(b"\n")[0])
            return Record(place, {}, b"", record.time) if is_known else record
        line, payload = _parts(head)
        said = _SAID.search(line)
        is_whole = _is_hashed(payload, said[1].decode() if said else None)
        return Record(place, {}, b"", head["time"], is_damaged=not is_whole)


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
    _, text, _ = next(_texts(file))
    head = _HEAD.match(text)
    return _record(place, head) if head else Record(place, {}, b"", is_damaged=True)


def _texts(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(place, text, is its last line complete) of every record from the file's position on; the file is read in
    blocks, since splitting all of it into lines is slow."""
    place, rest = file.tell(), b""
    while block := file.read(max(_BLOCK_BYTES, len(rest))):
        *whole, rest = _NEXT.split(rest + block)
        for text in whole:
            yield place, text, True
            place += len(text) + 1
    if rest:
        yield place, rest.removesuffix(b"\n"), rest.endswith(b"\n")


def _own_and_foreign(texts: Iterable[tuple[int, bytes, bool]]) -> Iterator[tuple[int, bytes, bool]]:
    """The texts, with what stands behind a record and is no line of it as a text of its own."""
    for place, text, is_complete in texts:
        if text.count(b"\n") == text.count(b"\n\t"):
            yield place, text, is_complete
        else:
            own = _FOREIGN.split(text, maxsplit=1)[0]
            yield place, own, True
            yield place + len(own) + 1, text[len(own) + 1 :], is_complete


def _parts(head: re.Match[bytes]) -> tuple[bytes, bytes | None]:
    """The line of JSON, and the payload without its tabs; None where there is none."""
    line, newline, rest = head.string[head.start("json") :].partition(b"\n")
    if not newline:
        return line, None
    return line, (newline + rest).replace(b"\n\t", b"\n")[1:]


def _record(place: int, head: re.Match[bytes]) -> Record:
    line, payload = _parts(head)
    metadata = json_object(line)
    text = payload or b""
    is_whole = _is_hashed(payload, metadata.get("has_payload")) and is_as_written(metadata, text)
    return Record(place, metadata, text, head["time"], is_damaged=not is_whole)


def _is_hashed(payload: bytes | None, said: object) -> bool:
    """True for the payload that torch hashed, and for no payload where torch wrote none."""
    if payload is None or said is None:
        return payload is said
    return hashlib.md5(payload, usedforsecurity=False).hexdigest() == said
