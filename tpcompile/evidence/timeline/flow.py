"""Bytes of a ring -> the lines of user code that one rank executed, oldest first; and as text that fits into a message.

recording/flow.c writes the ring while the program runs. What a reader finds is valid up to `head`, whatever became of
the process: it may have been killed.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any

from pydantic import Field

from tpcompile.evidence.records import Frozen, UserLine
from tpcompile.evidence.records.bounds import Number

HEADER = struct.Struct("<QQQQQ24x")
"""head, capacity, bytes of the table of codes, bytes of what was set before, entries of the setup; after the entries
come the table, the setup and what was set before."""
ENTRY = struct.Struct("<QII")
"""ns (Unix time), number of the code, kind << LINE_BITS | line."""
TABLE_BYTES = 1 << 20
"""Room for the table of codes."""
SETUP = 1 << 14
"""Most entries of the setup of a program that are kept for good."""
SETUP_BYTES = SETUP * ENTRY.size
LINE_BITS = 29
LINE_MASK = (1 << LINE_BITS) - 1
VALUE_BITS = 21
EXACT = 1 << 20
"""Marks the value of a small int; without it the value is a hash."""
_MAX_SENT = 40_000
"""Entries in a message: about 100 KB of text; the ring file of a rank on the same host has all."""
_PACKED = struct.Struct("<II")


class Kind(IntEnum):
    """What an entry is."""

    LINE = 0
    START = 1
    """A function begins; its line is the first of its code."""
    RETURN = 2
    MARK = 3
    """The `line`-th call of a compiled region, whose name is that of the code.

    Of a function: it ran so often that some of its steps are missing.
    """
    VALUE = 4
    """What the last line of the function gave a variable: `line` is number of the name << VALUE_BITS | value."""


RETURNED = 255
"""The number of the value that a function returns, which has no name."""
NEAR = 254
"""The number of a float, rounded to be shown; the entry with its hash follows."""
OWN = 253
"""The number of a value without the numbers of its rank in it; the entry with the whole value follows."""
LENGTH = 252
"""The number of the length of a list or tuple; the entry with its hash follows."""
GLOBAL = "global "
"""Begins the name of a variable of the module that a function gives a value."""
_NEAR_SHIFT = 12
"""Bits of a float32 that are left out."""


class Code(Frozen):
    """A function of the user, or a compiled region."""

    file: str
    function: str
    line: Number
    """First line; 0 for a region."""
    names: tuple[str, ...] = ()
    """Variables that it assigns, `size` or `self.scale`, by the number that a value has."""


WATCHED = Code(file="", function="<watched>", line=0)
"""Stands for the beginning of the watch: a step of the kind MARK, behind those of the setup."""


class Set(Frozen):
    """What the program had set when the recording began."""

    file: str
    function: str
    line: Number
    """The last line above the one that ran which sets the variable."""
    name: str
    """`size`, or `config.width` of the object that the line sets."""
    value: str
    """As text, the same on ranks that agree."""
    own: str = ""
    """The same without the rank's own numbers; empty where it has none of them."""


class Flow(Frozen):
    """The newest steps of one rank."""

    codes: tuple[Code, ...] = ()
    packed: Annotated[str, Field(max_length=4_000_000)] = ""
    """The steps, oldest first: base64 of zlib of pairs (number of the code, kind << LINE_BITS | line)."""
    num_before: Number = 0
    """Steps that are no longer known."""
    setup: Annotated[str, Field(max_length=1_000_000)] = ""
    """The first steps, of the setup of the program, packed as well, where the newest ones do not go back to them."""
    before: tuple[Set, ...] = ()
    """What was set before the first step."""
    issuing: tuple[Code, ...] = ()
    """Lines that issued a collective on this rank, as far as torch remembers; and regions, with an empty file."""

    @property
    def num_recorded(self) -> int:
        """Steps so far, kept or not. Raises ValueError for what no recorder writes."""
        return self.num_before + len(self.steps())

    def of_setup(self) -> Flow:
        """The first steps alone, as far as they are known."""
        return self if self.num_before == 0 else self.changed(packed=self.setup, num_before=0)

    def up_to(self, line: UserLine, number: int) -> Flow:
        """The steps up to that execution of a line; all, where so many are not known. Raises ValueError as `steps`."""
        steps = self.steps()
        codes = {at for at, code in enumerate(self.codes) if code.file == line.file}
        step = Kind.LINE << LINE_BITS | line.line
        ends = [at for at, (code, packed) in enumerate(steps, 1) if packed == step and code in codes]
        is_known = self.num_before == 0 and 0 < number < len(ends)
        return self.changed(packed=pack(steps[: ends[number - 1]])) if is_known else self

    def call_of(self, region: str, number: int) -> tuple[UserLine, int] | None:
        """The line that made that call of a region, and how often it had run by then; None where it is not known.

        `region` is how its name ends. Raises ValueError as `steps`.
        """
        steps = self.steps() if self.num_before == 0 else []
        regions = {at for at, code in enumerate(self.codes) if not code.file and code.function.endswith(region)}
        mark = Kind.MARK << LINE_BITS | number
        call = next((at for at, (code, packed) in enumerate(steps) if packed == mark and code in regions), 0)
        lines = [step for step in steps[:call] if step[1] >> LINE_BITS == Kind.LINE]
        if not lines:
            return None
        code, line = self.codes[lines[-1][0]], lines[-1][1] & LINE_MASK
        return UserLine(file=code.file, line=line, function=code.function), lines.count(lines[-1])

    def steps(self) -> list[tuple[int, int]]:
        """(number of the code, kind << LINE_BITS | line). Raises ValueError for what no recorder writes."""
        limit = _PACKED.size * (1 << 18)
        decoder = zlib.decompressobj()
        try:
            data = decoder.decompress(base64.b64decode(self.packed, validate=True), limit) if self.packed else b""
        except zlib.error as error:
            raise ValueError(f"the steps of a rank cannot be read: {error}") from None
        if len(data) % _PACKED.size or decoder.unconsumed_tail:
            raise ValueError("the steps of a rank are cut, or too many")
        steps = list(_PACKED.iter_unpack(data))
        if any(number >= len(self.codes) or packed >> LINE_BITS > max(Kind) for number, packed in steps):
            raise ValueError("a step of a rank names a code that is not in its table")
        return steps


SEED, _PRIME = 0xCBF29CE484222325, 0x100000001B3


def mixed(number: int, data: bytes) -> int:
    """FNV-1a, as in flow.c."""
    for byte in data:
        number = (number ^ byte) * _PRIME & 0xFFFFFFFFFFFFFFFF
    return number


def tagged(number: int, tag: bytes, value: int) -> int:
    """The hash after the kind of a value, and a number of 64 bits."""
    return mixed(number, tag + (value & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little"))


_DIGITS = re.compile(r"[0-9]+")
_TEXT, _SEARCHED = 64, 256
"""Letters of a text that are hashed, and in which numbers of the rank are looked for."""


def without_own(text: str, own: Collection[int]) -> str:
    """The text without these numbers: `rank_3.log` on rank 3 says what `rank_0.log` says on rank 0."""
    return _DIGITS.sub(lambda digits: "\0" if int(digits[0]) in own else digits[0], text)


def hashed(number: int, value: object, own: Collection[int] = ()) -> int:
    """The hash of None, of a bool, int, float or text, as in flow.c, without code of the value's class; else 0.

    A text is hashed without the rank's `own` numbers, if there are any.
    """
    kind: Any = type(value)  # isinstance would ask an object of the user's for its class
    given: Any = value
    if value is None:
        return tagged(number, b"N", 0)
    if kind is bool:
        return tagged(number, b"B", given)
    if issubclass(kind, int):
        exact = int.__index__(given)
        return tagged(number, b"I", exact if -(1 << 63) <= exact < 1 << 63 else 0)
    if issubclass(kind, float):
        return tagged(number, b"F", int.from_bytes(struct.pack("<d", float.__pos__(given)), "little"))
    if issubclass(kind, str):
        text = str.__getitem__(given, slice(_SEARCHED))
        number = tagged(number, b"S", 0 if own else str.__len__(given))
        for letter in (without_own(text, own) if own else text)[:_TEXT]:
            number = mixed(number, ord(letter).to_bytes(4, "little"))
        return number
    return 0


def hashed_name(number: int, name: str, own: Collection[int] = ()) -> int:
    """The hash of a dtype or a device, `torch.float32`."""
    return tagged(number, b"Y", hashed(SEED, name, own))


class Named(IntEnum):
    """What has a name, by which it is a value: the letter before it in a hash."""

    FUNCTION = ord("Q")
    """By its qualified name, of a bound method as well."""
    CLASS = ord("K")
    INSTANCE = ord("O")
    """By the name of its class."""
    MEMBER = ord("E")
    """Of an enumeration: `Mode.FAST`."""


def hashed_as(number: int, named: Named, name: str) -> int:
    """The hash of a function, a class, an object of one or a member of an enumeration, which is that of its name."""
    return hashed(tagged(number, bytes([named]), 0), name)


def near_bits(value: float) -> int:
    """A float as a float32, rounded to 11 bits of its mantissa, as in flow.c."""
    try:
        bits = struct.pack("<f", value)
    except OverflowError:
        bits = struct.pack("<f", math.copysign(math.inf, value))
    return (int.from_bytes(bits, "little") + (1 << _NEAR_SHIFT - 1) >> _NEAR_SHIFT) & EXACT - 1


def texts_of(literals: Iterable[object], named: Iterable[tuple[Named, str]] = ()) -> dict[int, str]:
    """The bits of values -> how they are written."""
    texts = {shortened(hashed_as(SEED, *one)): _text_of(*one) for one in named}
    texts |= {shortened(hashed(SEED, one)): repr(one) for one in literals}
    return {bits: text for bits, text in texts.items() if bits is not None}


def _text_of(named: Named, name: str) -> str:
    return f"{name}(...)" if named is Named.INSTANCE else name


def value_text(known: int, texts: Mapping[int, str] | None = None, near: int | None = None) -> str:
    """A value that its bits tell: a small int, None, a dtype, one of the `texts` of a program; empty for others.

    A float that is none of these is shown with the three digits that `near`, its rounded bits, have. What a program has
    only read, such as a token from a file, is never shown.
    """
    if known & EXACT:
        return str(known & EXACT - 1)
    named = _CONSTANTS.get(known) or (texts or {}).get(known, "")
    if named or near is None:
        return named
    (value,) = struct.unpack("<f", (near << _NEAR_SHIFT).to_bytes(4, "little"))
    return f"{value:.3g}"


def until(flow: Flow, raised_at: Sequence[tuple[str, int]]) -> Flow:
    """The steps before an exception: what a rank executes on its way out, it does because it waits no longer.

    `raised_at` are (file, line) of the traceback; the one that was executed last counts: the innermost, unless it ran
    so often that it was left out. What it called and what returned belongs to it: callbacks that a library calls.
    """
    steps = flow.steps()
    lines = {(number, line) for number, code in enumerate(flow.codes) for file, line in raised_at if code.file == file}
    last = max((index for index, step in enumerate(steps) if step in lines), default=None)  # the kind LINE is 0
    return flow if last is None else flow.model_copy(update={"packed": pack(steps[: _end_of(steps, last)])})


def _end_of(steps: Sequence[tuple[int, int]], last: int) -> int:
    """Index of the first step after a line that is not inside of what this line called: its frame is being left."""
    inside: list[int] = []
    for index in range(last + 1, len(steps)):
        number, packed = steps[index]
        kind = packed >> LINE_BITS
        if kind in (Kind.MARK, Kind.VALUE):
            continue
        if kind == Kind.START:
            inside.append(number)
        elif number not in inside:
            return index
        else:
            while inside[-1] != number:  # an exception that was caught further out left these
                inside.pop()
            if kind == Kind.RETURN:
                inside.pop()
    return len(steps)


def pack(steps: Sequence[tuple[int, int]]) -> str:
    """Steps as a `Flow` has them."""
    if not steps:
        return ""
    return base64.b64encode(zlib.compress(b"".join(_PACKED.pack(*step) for step in steps), 1)).decode()


def shortened(hashed: int) -> int | None:
    """The bits of a hash that a step has room for; None for 0, which says nothing."""
    return (hashed ^ hashed >> 20 ^ hashed >> 40) & (EXACT - 1) if hashed else None


_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
_CONSTANTS = {shortened(hashed(SEED, value)): repr(value) for value in (None, True, False)} | {
    shortened(hashed_name(SEED, f"torch.{name}")): f"torch.{name}" for name in _DTYPES
}


def flow_of(ring: bytes | mmap.mmap, *, limit: int = _MAX_SENT) -> Flow | None:
    """The newest `limit` steps in a ring; None for bytes that are none."""
    if len(ring) < HEADER.size:
        return None
    head, capacity, table_bytes, before_bytes, num_setup = HEADER.unpack_from(ring)
    end = HEADER.size + capacity * ENTRY.size
    before_at = end + TABLE_BYTES + SETUP_BYTES
    is_whole = len(ring) >= before_at + before_bytes and table_bytes <= TABLE_BYTES and num_setup <= SETUP
    if not 0 < capacity <= 1 << 24 or not is_whole:
        return None
    codes = _table(bytes(ring[end : end + table_bytes]))
    before = _before(bytes(ring[before_at : before_at + before_bytes]))
    if codes is None or before is None:
        return None

    def known(entries: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(number, step) for _, number, step in entries if number < len(codes)]

    newest = known(_entries(ring, head - min(head, capacity, limit), head, capacity))
    num_before = head - len(newest)
    setup = known(ENTRY.iter_unpack(ring[end + TABLE_BYTES :][: num_setup * ENTRY.size])) if num_before else []
    return Flow(codes=codes, packed=pack(newest), num_before=num_before, setup=pack(setup), before=before)


def _entries(ring: bytes | mmap.mmap, start: int, end: int, capacity: int) -> Iterator[tuple[int, int, int]]:
    for number in range(start, end):
        yield ENTRY.unpack_from(ring, HEADER.size + number % capacity * ENTRY.size)


def _before(data: bytes) -> tuple[Set, ...] | None:
    """What was set before, one JSON list a line."""
    try:
        rows = [json.loads(row) for row in data.splitlines()]
        return tuple(
            Set(file=file, function=code, line=at, name=name, value=value, own=own)
            for file, code, at, name, value, own in rows
        )
    except (ValueError, TypeError):
        return None


def _table(data: bytes) -> tuple[Code, ...] | None:
    """The codes by number: one JSON list (file, function, line) a line."""
    try:
        rows = [json.loads(row) for row in data.splitlines()]
        return tuple(
            Code(file=file, function=function, line=line, names=names) for file, function, line, *names in rows
        )
    except (ValueError, TypeError):
        return None
