"""One rank's TORCH_TRACE file -> what its compiles are, in little memory; each can be read in full later.

A log is read once from front to back. Of every compile the places of its records, a hash of its text and a few
fields are kept; the text itself stays in the file until somebody asks for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpcompile.evidence.logs.tracefile import (
    EXECUTION,
    SCHEDULE,
    TORCH_VERSION,
    FileFacts,
    Record,
    TraceFile,
    events_at,
)
from tpcompile.evidence.records import CompileRecord, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.normalise import GroupRoles
from tpcompile.evidence.trace import CACHE_EVENTS, CompileNumbers, TraceEvent, compile_record, frame_line, start_stack

_GRAPHS = frozenset({"dynamo_output_graph", "aot_forward_graph", "aot_inference_graph", "aot_backward_graph"})
_GROUP = re.compile(
    rb"((?:torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem|_dtensor)\.(?P<op>\w+)[\w.]*\([^'\"\n]*"
    rb"(?:['\"]\w*['\"][^'\"\n]*,\s*)?)['\"])(?P<group>[^'\"\n]*)(?=['\"]\))"
)
_GROUP_GUARD = re.compile(rb"((?:group_name|pg_name)\S* == ')(?P<group>[^'\n]*)(?=')")
_BY_NATURE = (
    (b"Guard latency = ", re.compile(rb"(Guard latency = )[^\n]*")),
    (
        b"___check_",
        re.compile(rb"(___check_(?:obj_id|type_id|fake_script_type)\([^\n]*?), \d+\)(?=, type=|[ ]*(?:#|\n|$))"),
    ),
    (b"0x", re.compile(rb"(?<!\w)(0x)[0-9a-fA-F]{5,}\b")),
    (b"__dtensor_spec_", re.compile(rb"(__dtensor_spec_)\d+")),
    (b"cuda:", re.compile(rb"(?<!\w)(cuda:)\d+\b")),
    (b"index=", re.compile(rb"(device\(type='\w+', index=)\d+")),
)
"""A part of what a full parse takes out, by text that must be there. Less is safe: texts that differ are parsed."""
_TENSOR_FIELDS = ("id", "describer_id", "dtype", "size", "stride", "device", "requires_grad")
_FAILURE_FIELDS = ("fail_type", "fail_reason", "fail_user_frame_filename", "fail_user_frame_lineno")
_HASH_BYTES = 16


@dataclass(slots=True)
class LoggedCompile:
    """One compile of one rank, without its text."""

    compile_id: str
    before: int | None
    """The compile before of the same frame, by number."""
    places: array[int] = field(default_factory=lambda: array("Q"))
    start: int | None = None
    """Place of its `dynamo_start`; None for a call that only exceeded the recompile limit."""
    function: str = ""
    line: UserLine | None = None
    size_bytes: int = 0
    """Text a full parse has to read."""
    names: frozenset[str] = frozenset()
    groups: dict[str, None] = field(default_factory=dict)
    """Process groups its graphs name, as torch names them, in order of appearance."""
    issued: list[tuple[str, str]] = field(default_factory=list)
    """(op, group) of the collectives in its graphs, as their text has them."""
    schedules: list[tuple[str, ...]] = field(default_factory=list)
    """What Inductor scheduled: the kernels of collectives in order, forward before backward."""
    failure: tuple[str, str] | None = None
    """(type, first line) of the error, when the compile failed."""
    sha: str = ""
    """Hash of the whole text, without what differs by nature and without names of groups."""

    @property
    def is_ended(self) -> bool:
        """True when torch logged the end of the compile."""
        return "compilation_metrics" in self.names

    @property
    def frame(self) -> tuple[str, str, int]:
        """The compiled frame: function, end of the path, line."""
        if self.line is None:
            return self.function, "", 0
        return self.function, normalise.short_path(self.line.file), self.line.line


@dataclass
class RankLog:
    """The log of one rank, read once."""

    rank: int
    path: Path
    facts: FileFacts = field(default_factory=FileFacts)
    compiles: list[LoggedCompile] = field(default_factory=list)
    strings: dict[int, str] = field(default_factory=dict)
    torch_version: str = ""
    executions: list[tuple[str, ...]] = field(default_factory=list)
    """Order in which compiled graphs ran, by compile id, one per recording."""

    @property
    def groups(self) -> dict[str, None]:
        """Names of the process groups in compiled code, in order of appearance."""
        return {name: None for compile_ in self.compiles for name in compile_.groups}

    def record(self, number: int, roles: GroupRoles) -> CompileRecord:
        """Read one compile in full."""
        compile_ = self.compiles[number]
        events = list(events_at(self.path, compile_.places))
        return compile_record(events, before=self._start_before(compile_), roles=roles, strings=self.strings)

    def _start_before(self, compile_: LoggedCompile) -> TraceEvent | None:
        """The start of the nearest compile before of the same frame that has one."""
        before = compile_.before
        while before is not None and self.compiles[before].start is None:
            before = self.compiles[before].before
        place = self.compiles[before].start if before is not None else None
        return next(events_at(self.path, [place]), None) if place is not None else None


def read_rank_log(rank: int, path: Path) -> RankLog:
    """Read a log from front to back, once. Raises OSError."""
    file = TraceFile(path)
    log = RankLog(rank, path, file.facts)
    reader = _Reader(log)
    for record in file.records():
        reader.take(record)
    reader.close()
    return log


class _Reader:
    """Records of one log, in order, into a `RankLog`."""

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.number_of = CompileNumbers()
        self.texts: list[hashlib.blake2b] = []
        self.names: list[set[str]] = []

    def take(self, record: Record) -> None:
        found = record.event
        if found is None:
            return
        if found.name == "str":
            text, index = found.metadata["str"]
            self.log.strings[int(index)] = str(text)
        elif found.name == TORCH_VERSION:
            self.log.torch_version = str(_json(found.payload).get("pytorch_version", ""))
        elif found.name == EXECUTION:
            self.log.executions.append(_execution(found.payload))
        elif found.compile_id is not None:
            self.of_compile(found, record)

    def of_compile(self, found: TraceEvent, record: Record) -> None:
        number = self.number_of(found)
        if number == len(self.log.compiles):
            self.log.compiles.append(self.begun(found, number))
            self.texts.append(hashlib.blake2b(digest_size=_HASH_BYTES))
            self.names.append(set())
        compile_ = self.log.compiles[number]
        compile_.places.append(record.start)
        self.names[number].add(found.name)
        if found.name == "dynamo_start":
            compile_.start = record.start
            self.name(compile_, found)
        elif found.name == SCHEDULE:
            compile_.schedules.append(_schedule(found.payload))
        elif found.name == "compilation_metrics":
            compile_.failure = _failure(found) or compile_.failure
        compile_.size_bytes += len(record.payload)
        text = _text(compile_, found, b"" if found.name in CACHE_EVENTS else record.payload)
        self.texts[number].update(f"{found.name} {found.attempt} {len(text)} ".encode() + text)

    def close(self) -> None:
        """No event will follow."""
        known: dict[frozenset[str], frozenset[str]] = {}
        for compile_, text, names in zip(self.log.compiles, self.texts, self.names, strict=True):
            compile_.sha = text.hexdigest()
            compile_.names = known.setdefault(frozenset(names), frozenset(names))

    def begun(self, found: TraceEvent, number: int) -> LoggedCompile:
        before = self.number_of.before[number]
        compile_ = LoggedCompile(str(found.compile_id), before)
        if before is not None:  # until its own start says so
            compile_.function = self.log.compiles[before].function
            compile_.line = self.log.compiles[before].line
        return compile_

    def name(self, compile_: LoggedCompile, start: TraceEvent) -> None:
        stack = start_stack(start, self.log.strings)
        compile_.function = stack[-1].function if stack else ""
        compile_.line = frame_line(stack)


def _text(compile_: LoggedCompile, found: TraceEvent, payload: bytes) -> bytes:
    """What the digest of a full parse could depend on, of one event."""
    name = found.name
    if name == "dynamo_start":
        return repr(compile_.frame).encode()
    if name == "describe_tensor":
        return _tensor_text(found.metadata["describe_tensor"])
    if name == "describe_source":
        return json.dumps(found.metadata["describe_source"], sort_keys=True).encode()
    if name in ("compilation_metrics", "bwd_compilation_metrics"):
        return repr(compile_.failure).encode()
    return _without_ids(_without_groups(compile_, name, payload))


def _tensor_text(tensor: Mapping[str, Any]) -> bytes:
    marks = sorted((key, str(tensor[key])) for key in tensor if key.startswith("dynamo_"))
    fields = [str(tensor.get(key)) for key in _TENSOR_FIELDS]
    return normalise.device(repr((fields, marks))).encode()


def _without_ids(payload: bytes) -> bytes:
    for mark, pattern in _BY_NATURE:
        if mark in payload:
            payload = pattern.sub(rb"\1", payload)
    return payload


def _without_groups(compile_: LoggedCompile, name: str, payload: bytes) -> bytes:
    """The text with every group's name replaced by its place among the names of this compile."""

    def numbered(match: re.Match[bytes]) -> bytes:
        group = match["group"].decode(errors="replace")
        if name in _GRAPHS and "op" in match.re.groupindex:
            compile_.issued.append((match["op"].decode(), group))
        compile_.groups.setdefault(group)
        return match[1] + str(list(compile_.groups).index(group)).encode()

    for pattern, mark in ((_GROUP, b"torch.ops."), (_GROUP_GUARD, b"_name")):
        if mark in payload:
            payload = pattern.sub(numbered, payload)
    return payload


def _json(text: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _execution(text: str) -> tuple[str, ...]:
    order = _json(text).get("graph_execution_order", [])
    return tuple(str(entry.get("compile_id")) for entry in order if isinstance(entry, dict))


def _schedule(text: str) -> tuple[str, ...]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _failure(found: TraceEvent) -> tuple[str, str] | None:
    metrics = found.metadata.get("compilation_metrics")
    if not isinstance(metrics, Mapping) or not metrics.get("fail_type"):
        return None
    return str(metrics["fail_type"]), normalise.error(str(metrics.get("fail_reason") or ""))


def records_of(log: RankLog, roles: Mapping[str, str], *, kept: int = 4) -> functools._lru_cache_wrapper[CompileRecord]:
    """A reader of the rank's compiles by number that keeps the last few."""
    groups = GroupRoles(roles)
    return functools.lru_cache(maxsize=kept)(lambda number: log.record(number, groups))
