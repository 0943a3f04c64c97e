"""A seed -> one damaged copy of the log of one rank: what a full disk or a crash does to a TORCH_TRACE file."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

_RECORD = re.compile(rb"^[A-Z]\d{4} [\d:.]+ ", re.MULTILINE)
_SAID = re.compile(rb'(?<="has_payload": ")[0-9a-f]{32}(?="})')
_EVENT = re.compile(rb'\] \{"(?:artifact": \{"name": ")?(aot|\w+)')
_ALIENS: tuple[Any, ...] = (
    None, True, -1, 7, 10**30, 1.5, float("nan"), "", "alien", "x" * 5000, [], [7], [[]], {}, {"a": None}, [None, {}],
)  # fmt: skip
"""Values of every JSON type, some of them out of any range."""


def starts(log: bytes) -> list[int]:
    """Where each record begins, and the end of the log."""
    return [*(match.start() for match in _RECORD.finditer(log)), len(log)]


def records(log: bytes) -> list[bytes]:
    """The records of a log, each with its payload."""
    places = starts(log)
    return [log[begin:end] for begin, end in itertools.pairwise(places)]


def rehashed(text: str) -> str:
    """An edited log with the hashes of its payloads, as a job that logged it would have written it."""
    return "".join(_rehashed(record.decode()) for record in records(text.encode()))


def _rehashed(record: str) -> str:
    line, _, rest = record.partition("\n")
    payload = rest.removeprefix("\t").removesuffix("\n").replace("\n\t", "\n")
    md5 = hashlib.md5(payload.encode(), usedforsecurity=False).hexdigest()
    return re.sub(r'"has_payload": "\w+"', f'"has_payload": "{md5}"', line) + "\n" + rest


def truncated(log: bytes, rng: random.Random) -> bytes:
    """The first part of the log: its writer was killed, or the disk was full. It ends inside of a record.

    A log that ends between two records is whole as far as anyone can tell, see docs/divergence.md.
    """
    place = rng.choice(list(set(range(len(log))).difference(starts(log))))
    return log[:place]


def one_byte(log: bytes, rng: random.Random) -> bytes:
    """One byte with a different value."""
    return _changed(log, rng, 1)


def twenty_bytes(log: bytes, rng: random.Random) -> bytes:
    """Twenty bytes with different values, anywhere."""
    return _changed(log, rng, 20)


def _changed(log: bytes, rng: random.Random, count: int) -> bytes:
    damaged = bytearray(log)
    for place in rng.sample(range(len(log)), count):
        damaged[place] = rng.choice([value for value in range(256) if value != log[place]])
    return bytes(damaged)


def printable(log: bytes, rng: random.Random) -> bytes:
    """One letter or digit replaced by one of the same kind, so that the record can still be parsed."""
    places = [place for place, value in enumerate(log) if chr(value).isascii() and chr(value).isalnum()]
    place = rng.choice(places)
    kind = "0123456789" if chr(log[place]).isdigit() else "abcdefghijklmnopqrstuvwxyz"
    return log[:place] + rng.choice([c for c in kind if ord(c) != log[place]]).encode() + log[place + 1 :]


def in_an_envelope(log: bytes, rng: random.Random) -> bytes:
    """As `printable`, in the line of JSON of a record: no checksum covers it."""
    found = records(log)
    number = rng.randrange(len(found))
    line, _, rest = found[number].partition(b"\n")
    begin = line.index(b"{")
    found[number] = line[:begin] + printable(line[begin:], rng) + b"\n" + rest
    return b"".join(found)


def hole(log: bytes, rng: random.Random) -> bytes:
    """A range of NULs, as a file system leaves it after a crash."""
    begin, end = _range(log, rng)
    return log[:begin] + bytes(end - begin) + log[end:]


def cut(log: bytes, rng: random.Random) -> bytes:
    """A range that is gone."""
    begin, end = _range(log, rng)
    return log[:begin] + log[end:]


def _range(log: bytes, rng: random.Random) -> tuple[int, int]:
    size = min(len(log) - 1, rng.choice([1, 10, 100, 1000, 4096]))
    begin = rng.randrange(len(log) - size)
    return begin, begin + size


def nuls_behind(log: bytes, rng: random.Random) -> bytes:
    """NULs behind the end."""
    return log + bytes(rng.choice([1, 512, 4096]))


def doubled(log: bytes, rng: random.Random) -> bytes:
    """A record that is written twice, at once or later."""
    found = records(log)
    number = rng.randrange(len(found))
    later = rng.choice([number + 1, rng.randint(number + 1, len(found))])
    found.insert(later, found[number])
    return b"".join(found)


def lost(log: bytes, rng: random.Random) -> bytes:
    """A record that is missing; not the whole of the last compile, whose loss cannot be seen."""
    found = records(log)
    del found[rng.randrange(len(found))]
    return b"".join(found)


def swapped(log: bytes, rng: random.Random) -> bytes:
    """Two records in each other's place."""
    found = records(log)
    first = rng.randrange(len(found) - 1)
    second = rng.choice([first + 1, rng.randrange(first + 1, len(found))])
    found[first], found[second] = found[second], found[first]
    return b"".join(found)


def other_type(log: bytes, rng: random.Random) -> bytes:
    """A value of a record's JSON replaced by one of a different type, or the JSON by one of these."""
    found = records(log)
    number = rng.randrange(len(found))
    line, newline, rest = found[number].partition(b"\n")
    begin = line.index(b"{")
    envelope = json.loads(line[begin:])
    text = json.dumps(_with_alien(envelope, rng)).encode()
    found[number] = line[:begin] + text + newline + rest
    return b"".join(found)


def _with_alien(value: Any, rng: random.Random) -> Any:
    """The value with one part of it, at any depth, replaced."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or rng.random() < 0.2:
        return rng.choice(_ALIENS)
    key = rng.choice(list(inner))
    value[key] = _with_alien(value[key], rng)
    return value


def lost_range(log: bytes, rng: random.Random) -> bytes:
    """Records in a row that are missing; not a whole compile, whose loss cannot be seen where it is the last one."""
    found = records(log)
    begin = rng.randrange(len(found) - 1)
    missing = found[begin : begin + rng.randint(2, 4)]
    reasons = [number for number, record in enumerate(missing) if b'"recompile_reasons"' in record]
    if reasons:  # where the limit is exceeded, reasons and metrics are all of a compile
        missing = missing[: reasons[0] + 1]
    return b"".join([*found[:begin], *found[begin + len(missing) :]])


def appended(log: bytes, rng: random.Random) -> bytes:
    """The log, and behind it the same log or a part of it: a copy that was started twice."""
    found = records(log)
    begin, end = sorted(rng.sample(range(len(found) + 1), 2))
    again = rng.choice([found, found[begin:end]])
    return b"".join([*found, *again])


def exchanged(log: bytes, rng: random.Random) -> bytes:
    """Two records with each other's payload and its hash.

    They are of different events: nothing in a log says which of two sets of guards is that of which compile.
    """
    found = [record.partition(b"\n") for record in records(log)]
    with_payload = [number for number, (line, _, _) in enumerate(found) if _SAID.search(line)]
    one = rng.choice(with_payload)
    kinds = {number: _event(found[number][0]) for number in with_payload}
    other = rng.choice([number for number in with_payload if kinds[number] != kinds[one]])
    hashes = [_SAID.findall(found[number][0])[0] for number in (one, other)]
    lines = [_SAID.sub(sha, found[number][0]) for number, sha in ((one, hashes[1]), (other, hashes[0]))]
    found[one], found[other] = (lines[0], b"\n", found[other][2]), (lines[1], b"\n", found[one][2])
    return b"".join(map(b"".join, found))


def _event(line: bytes) -> bytes:
    """The event of a record; one for all lowered graphs."""
    return _EVENT.findall(line)[0]


def half_a_pair(log: bytes, rng: random.Random) -> bytes:
    """A text of a record's JSON with half of a surrogate pair, which cannot be encoded."""
    found = records(log)
    number = rng.randrange(len(found))
    line, newline, rest = found[number].partition(b"\n")
    place = rng.choice([match.end() for match in re.finditer(rb': "|, "', line)] or [len(line)])
    found[number] = line[:place] + rng.choice([b"\\ud800", b"\\udfff"]) + line[place:] + newline + rest
    return b"".join(found)


def moved(log: bytes, rng: random.Random, *, peer: bytes) -> bytes:
    """Records of the log of another rank among those of this one."""
    found, theirs = records(log), records(peer)
    begin = rng.randrange(len(theirs))
    place = rng.randrange(len(found) + 1)
    found[place:place] = theirs[begin : begin + rng.choice([1, 1, 3, 10, len(theirs)])]
    return b"".join(found)


def two_runs(log: bytes, rng: random.Random, *, peer: bytes) -> bytes:
    """Two runs of one rank in one file; the second one is that of any job."""
    return b"".join(rng.sample([log, peer], 2))


OPERATORS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncated, one_byte, twenty_bytes, printable, in_an_envelope, hole, cut, nuls_behind, doubled, lost, swapped,
    other_type, lost_range, appended, exchanged, half_a_pair,
)  # fmt: skip
"""All kinds of damage to one log."""
OF_TWO: tuple[Callable[..., bytes], ...] = (moved, two_runs)
"""Those that need a second log: of the other rank of the same job, and of any job."""
