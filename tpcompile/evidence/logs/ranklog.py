"""One rank's TORCH_TRACE file -> its compiles, in little memory; each can be read in full later.

A log is read once from front to back. Of every compile the places of its records, a hash of its text and a few fields
are kept; the text itself is read again where a compile is parsed in full.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpcompile.evidence.compiles.contradictions import CODE, INDUCTOR_TIME, LOWERED, Damage, Flaw
from tpcompile.evidence.compiles.events import CACHE_EVENTS, FUSION, GRAPH_KINDS, TraceEvent, event
from tpcompile.evidence.compiles.record import LoggedEvents, start_stack
from tpcompile.evidence.compiles.shapes import (
    BACKWARD_METRICS,
    EXECUTION,
    FILE_EVENTS,
    JOINT_GRAPH,
    SCHEDULE,
    TORCH_VERSION,
    json_object,
    json_value,
)
from tpcompile.evidence.compiles.trace import CompileNumbers
from tpcompile.evidence.iterables import find, first, grouped
from tpcompile.evidence.logs.compiled import Frame, LoggedCompile
from tpcompile.evidence.logs.tracefile import FileFacts, Record, TraceFile, events_at
from tpcompile.evidence.logs.unreliable_compiles import Soundness
from tpcompile.evidence.records import CompileRecord
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import innermost
from tpcompile.evidence.text.normalise import GroupRoles

_BEGINNINGS = frozenset({"str", TORCH_VERSION})
"""Events that a process logs before any compile."""
_OF_JOB = _BEGINNINGS | {EXECUTION}
"""Events of the job, not of a compile."""
_WITHOUT_TEXT = CACHE_EVENTS | {JOINT_GRAPH}
"""Events whose payload is not compared."""
_DIGITS = re.compile(rb"\d+")
_GROUP = re.compile(
    rb"((?:torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem|_dtensor)\.(?!wait_tensor)(?P<op>\w++)(?:\.\w++)?+\("
    rb"(?:(?!torch\.ops\.)[^'\"\n])*+(?:['\"]\w*['\"][^'\"\n]*,\s*)?)['\"])(?P<group>[^'\"\n]*)(?=['\"]\))"
)
_HAVE_SIZE = (b"all_gather", b"reduce_scatter")
"""A call with the size of its group as an argument, 1; a reduction has no such argument."""
_GROUP_GUARD = re.compile(
    rb"(_name(?:(?<=group_name)|(?<=pg_name))(?:(?!group_name|pg_name)\S)*+ == ')(?P<group>[^'\n]*)(?=')"
)


_PREFIX: Callable[[re.Match[bytes]], bytes] = operator.itemgetter(1)
"""What stands before the part that differs by nature; `re` expands a template in Python, which is slower."""
_BY_NATURE: tuple[tuple[bytes, re.Pattern[bytes], bytes | Callable[[re.Match[bytes]], bytes]], ...] = (
    (b"Guard latency = ", re.compile(rb"Guard latency = [^\n]*"), b"Guard latency"),
    (
        b"___check_",
        re.compile(
            rb"(___check_(?:obj_id|type_id|fake_script_type)\((?:(?!___check_)[^\n])*?), \d+\)"
            rb"(?=, type=|[ ]*(?:#|\n|$))"
        ),
        _PREFIX,
    ),
    (b"0x", re.compile(rb"(?<!\w)0x[0-9a-fA-F]{5,}\b"), b"0x"),
    (b"__dtensor_spec_", re.compile(rb"__dtensor_spec_\d+"), b"__dtensor_spec_"),
    (b"cuda:", re.compile(rb"(?<!\w)cuda:\d+\b"), b"cuda:"),
    (b"index=", re.compile(rb"(device\(type='\w+', index=)\d+"), _PREFIX),
)
"""A part of what a full parse takes out: text that must be there, what is replaced, and with what. Less is safe: texts
that differ are parsed."""
_LOWERED = LOWERED | {CODE, SCHEDULE, FUSION}
_TENSOR_FIELDS = ("id", "describer_id", "dtype", "size", "stride", "device", "requires_grad")
_HASH_BYTES = 16


@dataclass
class RankLog:
    """The log of one rank, read once."""

    rank: int
    path: Path
    facts: FileFacts = field(default_factory=FileFacts)
    compiles: list[LoggedCompile] = field(default_factory=list)
    strings: dict[int, str] = field(default_factory=dict)
    is_of_two_runs: bool = False
    """True when a second process wrote to it: which records belong together is not known then."""
    missing: frozenset[str] = frozenset()
    """Ranges of frames without any compile, `3-4`: torch numbers them without gaps."""
    torch_version: str = ""
    executions: list[tuple[str, ...]] = field(default_factory=list)
    """Order in which compiled graphs ran, by compile id, one per recording."""

    @functools.cached_property
    def by_frame(self) -> dict[Frame, list[LoggedCompile]]:
        """Compiles of every frame that can be compared, in order of appearance; known once the whole log was read."""
        return grouped(self.sound.values(), lambda compile_: compile_.frame)

    @functools.cached_property
    def sound(self) -> dict[int, LoggedCompile]:
        """Number -> compile, of those that can be compared: no compile of their frame is damaged.

        The second compile of a frame on one rank corresponds to the second one elsewhere, so all of them are needed.
        """
        if self.is_of_two_runs:
            return {}
        # a damaged start names the wrong function, so the frame is known by torch's number of it
        by_code = grouped(self.compiles, lambda compile_: compile_.compile_id.rpartition("/")[0])
        frames: set[Frame] = set()
        for compiles in by_code.values():
            is_damaged = find(compiles, lambda compile_: compile_.damage) is not None
            if is_damaged:
                frames.update(compile_.frame for compile_ in compiles)
        numbered = enumerate(self.compiles)
        return {number: compile_ for number, compile_ in numbered if compile_.frame not in frames}

    def lost(self, compile_: LoggedCompile) -> None:
        """Note what the logs of other ranks show: this compile lacks a record, and is not compared."""
        compile_.damage = compile_.damage or Damage(Flaw.FEWER_THAN_PEERS)
        for known in ("by_frame", "sound"):
            self.__dict__.pop(known, None)

    @property
    def damaged(self) -> LoggedCompile | None:
        """The first compile that cannot be relied on."""
        return find(self.compiles, lambda compile_: compile_.damage)

    @property
    def sizes(self) -> Counter[Frame]:
        """Bytes of text of every compiled frame, in order of appearance."""
        sizes: Counter[Frame] = Counter()
        for compile_ in self.compiles:
            sizes[compile_.frame] += compile_.size_bytes
        return sizes

    @property
    def fatal(self) -> dict[int, LoggedCompile]:
        """Compiles with an error that ends the program, by number."""
        return {number: compile_ for number, compile_ in self.sound.items() if compile_.is_fatal}

    @property
    def groups(self) -> dict[str, None]:
        """Names of the process groups in compiled code, in order of appearance."""
        return dict.fromkeys(itertools.chain.from_iterable(compile_.groups for compile_ in self.compiles))

    @property
    def coupling(self) -> list[str]:
        """Names of those groups that have more than one rank."""
        alone = set[str]().union(*(compile_.alone for compile_ in self.compiles))
        return [name for name in self.groups if name not in alone]

    def record(self, number: int, roles: GroupRoles) -> CompileRecord:
        """Read one compile in full."""
        compile_ = self.compiles[number]
        events = list(events_at(self.path, compile_.places))
        before = [] if compile_.start_before is None else [compile_.start_before]
        start_before = first(events_at(self.path, before))
        logged = LoggedEvents(compile_.compile_id, start_before, events)
        return logged.record(roles, self.strings, is_ended=True)


def read_rank_log(rank: int, path: Path) -> RankLog:
    """Read a log from front to back, once. Raises OSError."""
    file = TraceFile(path)
    log = RankLog(rank, path, file.facts)
    reader = _Reader(log)
    for record in file.records():
        reader.take(record)
    reader.soundness.finish()
    log.missing = frozenset(reader.soundness.missing)
    return log


class _Reader:
    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.number_of = CompileNumbers()
        self.soundness = Soundness(log.compiles)
        self.same: dict[frozenset[str], frozenset[str]] = {}
        """Sets of names, each kept once: most compiles have the same events."""
        self.lowered: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.began: dict[str, bytes] = {}
        """Event with which a process begins its log -> time."""

    def take(self, record: Record) -> None:
        if record.is_damaged:
            self.soundness.damaged(record.metadata)
            return
        # without its text, which only a full parse needs: decoding it takes long
        found = event(record.metadata, None, wanted=FILE_EVENTS)
        if found is None:
            return
        if found.name in _OF_JOB:
            self.of_job(found, record)
        elif found.compile_id is not None:
            self.of_compile(found, record)

    def of_job(self, found: TraceEvent, record: Record) -> None:
        self.log.is_of_two_runs |= self.begins_again(found, record)
        if found.name == "str":
            text, index = found.metadata["str"]
            self.log.strings[int(index)] = str(text)
            return
        body = json_object(record.payload)
        if found.name == TORCH_VERSION:
            self.log.torch_version = str(body.get("pytorch_version", ""))
        else:
            order = body.get("graph_execution_order", [])
            self.log.executions.append(tuple(str(entry.get("compile_id")) for entry in order))

    def begins_again(self, found: TraceEvent, record: Record) -> bool:
        """True for a version of torch, or a first string, that was logged at a different time before."""
        strings = self.log.strings
        if found.name == "str" and strings:
            _, index = found.metadata["str"]
            is_beginning = index <= first(strings)
        else:
            is_beginning = found.name in _BEGINNINGS
        return is_beginning and self.began.setdefault(found.name, record.time) != record.time

    def of_compile(self, found: TraceEvent, record: Record) -> None:
        number = self.number_of(found)
        if self.soundness.is_stray(number, found.name):
            return
        if number == len(self.log.compiles):
            self.log.compiles.append(self.begun(found, number))
            self.soundness.begin(number, record.time)
            self.log.compiles[number].began = record.time
        compile_ = self.log.compiles[number]
        compile_.ended = record.time
        if found.name != JOINT_GRAPH:
            compile_.places.append(record.start)
            compile_.size_bytes += len(record.payload)
        names = compile_.names | {found.name}
        compile_.names = self.same.setdefault(names, names)
        stack = start_stack(found, self.log.strings) if found.name == "dynamo_start" else None
        if stack is not None:
            compile_.start = record.start
            compile_.starts_in(stack[-1].function if stack else "", innermost(stack))
        if found.name in _LOWERED:
            lowered = tuple(sorted([*compile_.lowered, found.name]))
            compile_.lowered = self.lowered.setdefault(lowered, lowered)
        self.soundness.take(number, found, record.time, stack)
        text = _counting_text(compile_, found, record.payload)
        said = f"{compile_.sha} {found.name} {found.attempt} ".encode() + text
        compile_.sha = hashlib.blake2b(said, digest_size=_HASH_BYTES).hexdigest()

    def begun(self, found: TraceEvent, number: int) -> LoggedCompile:
        compile_ = LoggedCompile(str(found.compile_id))
        number_before = self.number_of.before[number]
        if number_before is not None:
            before = self.log.compiles[number_before]
            compile_.start_before = before.start_before if before.start is None else before.start
            compile_.starts_in(before.function, before.line)  # until its own start is read
        return compile_


def _counting_text(compile_: LoggedCompile, found: TraceEvent, payload: bytes) -> bytes:
    """The text of an event that the digest of a full parse could depend on; fields of the compile are noted too."""
    name = found.name
    if name in _WITHOUT_TEXT:
        return b""
    if name == "dynamo_start":
        return repr(tuple(compile_.frame)).encode()
    if name == "describe_tensor":
        tensor = found.metadata[name]
        marks = sorted((key, str(tensor[key])) for key in tensor if key.startswith("dynamo_"))
        fields = [str(tensor.get(key)) for key in _TENSOR_FIELDS]
        return normalise.device(repr((fields, marks))).encode()
    if name == "describe_source":
        return json.dumps(found.metadata[name], sort_keys=True).encode()
    if name in ("compilation_metrics", BACKWARD_METRICS):
        _note_end(compile_, found.metadata.get("compilation_metrics", {}))
        return compile_.error.encode()
    text, issued = _numbered(compile_, payload)
    for mark, pattern, replacement in _BY_NATURE:
        if mark in text:
            text = pattern.sub(replacement, text)
    if name in GRAPH_KINDS:
        compile_.issued += issued
    if name == "dynamo_output_graph":
        compile_.program = hashlib.blake2b(_DIGITS.sub(b"", text), digest_size=_HASH_BYTES).digest()
    elif name == SCHEDULE:
        compile_.schedules.append(tuple(map(str, json_value(payload) or ())))
    return text


def _note_end(compile_: LoggedCompile, metrics: Mapping[str, Any]) -> None:
    fail_type = metrics.get("fail_type")
    compile_.says_how_lowered |= INDUCTOR_TIME in metrics
    if fail_type:
        compile_.fail_type = str(fail_type)
        compile_.fail_text = normalise.error(str(metrics.get("fail_reason") or ""))


def _numbered(compile_: LoggedCompile, payload: bytes) -> tuple[bytes, list[tuple[str, str]]]:
    """The text with every group's name replaced by its number in this compile, and (op, group) of the calls."""
    issued = []

    def place_of(match: re.Match[bytes]) -> bytes:
        group = match["group"].decode(errors="replace")
        place = compile_.groups.setdefault(group, len(compile_.groups))
        return match[1] + str(place).encode()

    def call(match: re.Match[bytes]) -> bytes:
        group = match["group"].decode(errors="replace")
        issued.append((match["op"].decode(), group))
        has_size = match["op"].startswith(_HAVE_SIZE)
        arguments = match[1][:-1]
        if has_size and arguments.endswith(b", 1, "):
            compile_.alone.add(group)
        return place_of(match)

    text = _GROUP_GUARD.sub(place_of, _GROUP.sub(call, payload))
    return text, issued
