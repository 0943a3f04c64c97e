"""Events of one compile in a log, in order -> what contradicts what: evidence that something is missing or was changed.

Payloads are hashed, but no hash covers which records a log has, nor the JSON in front of a payload. What torch logs of
one compile is redundant, though: it begins with a start and ends with metrics, which repeat the stack, the reason, and
how much was traced and lowered. Each rule below compares two records of the same compile. Fields that a version of
torch does not log are not compared. Seen on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from tpcompile.evidence.compiles.events import CACHE_EVENTS, GRAPH_KINDS, TraceEvent
from tpcompile.evidence.compiles.record import UNKNOWN_FILE, described_tensor
from tpcompile.evidence.compiles.shapes import BACKWARD_METRICS, JOINT_GRAPH
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine

LOWERED = frozenset(GRAPH_KINDS) - {"dynamo_output_graph"}
CODE = "inductor_output_code"
_AFTER_THE_GRAPH = LOWERED | CACHE_EVENTS | {JOINT_GRAPH, CODE}
INDUCTOR_TIME = "inductor_cumulative_compile_time_us"
"""A field of the metrics: None for a backend besides Inductor. That of AOTAutograd holds the time of any backend."""
BEFORE_THE_END = frozenset(GRAPH_KINDS) | {
    JOINT_GRAPH,
    "dynamo_start", "describe_tensor", "describe_source", "dynamo_cpp_guards_str", "dynamo_graph_break_reason",
    "recompile_reasons",
}  # fmt: skip
"""Events that torch logs before the metrics of a compile; the code of a backward comes when it first runs."""
_FIRST = frozenset({"recompile_reasons", "dynamo_start", "compilation_metrics"})
_LAST = frozenset({"dynamo_cpp_guards_str", BACKWARD_METRICS})
"""The metrics come right behind the guards, and before any backward."""
_OF_A_BREAK = "For more details about this graph break"
"""Text in the reason of a restart whose attempt ended in a graph break, which is logged."""
_HITS = frozenset(name for name in CACHE_EVENTS if name.endswith("_hit"))


class Flaw(Enum):
    """Why a compile in a log cannot be relied on."""

    DAMAGED = "one of its records is damaged"
    BEGINS_TWICE = "it begins twice"
    MIXED = "a record of a different compile is among its records"
    AFTER_A_GAP = "an earlier compile of its frame is missing"
    FEWER_THAN_PEERS = "it lacks a record that other ranks have"
    FIRST_RECORD = "its first record is {event}"
    OUT_OF_ORDER = "{event} is out of order"
    EARLIER_ATTEMPT = "{event} is of an earlier attempt"
    AFTER_ITS_END = "{event} comes after its end"
    NO_START = "it has no start"
    NO_END = "it has no end"
    NO_FILE = "the name of a file in its stack is missing"
    NO_TENSOR = "a tensor that enters it is not described"
    NO_REASON = "it is a recompile without a reason"
    NO_BREAK_REASON = "the reason of its graph break is missing"
    OTHER_STACK = "its start and its end have different stacks"
    OTHER_FUNCTION = "its start and its end name different functions"
    NO_GRAPH = "its graph is missing"
    NO_GUARDS = "its guards are missing"
    NO_FORWARD = "its forward graph is missing"
    NO_BACKWARD = "its backward graph is missing"
    NO_LOWERED = "its lowered graphs are missing"
    NO_CODE = "its generated code is missing"
    NO_CACHE_HIT = "what it loaded from a cache is missing"


class Damage(NamedTuple):
    """What is wrong with a compile, and the event that shows it, where a single one does."""

    flaw: Flaw
    event: str = ""

    def __str__(self) -> str:
        return self.flaw.value.format(event=self.event)


@dataclass(frozen=True)
class _Implied:
    """A record that a compile without an error has to have."""

    flaw: Flaw
    """What is wrong without it."""
    needs: Set[str]
    """One of these events."""
    counted: str = ""
    """Field of the metrics; the record has to be there where it is a number besides 0."""
    after: Set[str] = frozenset()
    """Events; the record has to be there, too, where one of them was logged."""


_IMPLIED = (
    _Implied(Flaw.NO_GRAPH, {"dynamo_output_graph"}, "graph_op_count", _AFTER_THE_GRAPH),
    _Implied(Flaw.NO_GUARDS, {"dynamo_cpp_guards_str"}, "guard_count", {"dynamo_output_graph"}),
    _Implied(Flaw.NO_FORWARD, {"aot_forward_graph"}, after={JOINT_GRAPH, "aot_backward_graph"}),
    _Implied(Flaw.NO_BACKWARD, {"aot_backward_graph"}, after={JOINT_GRAPH, "aot_forward_graph"}),
    _Implied(Flaw.NO_BACKWARD, {"aot_backward_graph", *_HITS}, after={BACKWARD_METRICS}),
    _Implied(Flaw.NO_LOWERED, LOWERED | _HITS, INDUCTOR_TIME),
    _Implied(Flaw.NO_CODE, {CODE, *_HITS}, INDUCTOR_TIME),
    _Implied(Flaw.NO_CACHE_HIT, _HITS, "aotautograd_local_cache_hit_count"),
    _Implied(Flaw.NO_CACHE_HIT, _HITS, "aotautograd_remote_cache_hit_count"),
    _Implied(Flaw.NO_CACHE_HIT, _HITS, "inductor_fx_local_cache_hit_count"),
    _Implied(Flaw.NO_CACHE_HIT, _HITS, "inductor_fx_remote_cache_hit_count"),
)


def is_earlier(time: bytes, than: bytes) -> bool:
    """True for a time of a record, `MMDD hh:mm:ss.ffffff`, before that of another; a year ends in between at most."""
    is_new_year = than.startswith(b"12") and time.startswith(b"01")
    return time < than and not is_new_year


@dataclass(slots=True)
class Story:
    """What one compile has logged so far."""

    compile_id: str
    names: set[str] = field(default_factory=set)
    time: bytes = b""
    attempt: int = 0
    stack: Sequence[UserLine] | None = None
    """Stack of the last start; None without a start."""
    tensors: set[tuple[object, object]] = field(default_factory=set)
    sources: set[tuple[object, object]] = field(default_factory=set)
    damage: Damage | None = None
    """The first contradiction."""

    def take(self, item: TraceEvent, time: bytes) -> None:
        """Note an event and compare it with what came before; `time` is that of its record."""
        self.damage = self.damage or self._out_of_order(item, time)
        self.time = time
        self.attempt = max(item.attempt, self.attempt)
        self.names.add(item.name)
        if item.name == "describe_tensor":
            self.tensors.add(described_tensor(item))
        elif item.name == "describe_source":
            self.sources.add(described_tensor(item))
        elif item.name == "compilation_metrics":
            self._note(self._at_the_end(item.metadata["compilation_metrics"]))
            # a log has thousands of compiles, and what follows their ends is compared with the names only
            self.tensors, self.sources, self.stack = set(), set(), None

    def end_of_log(self, *, is_in_progress: bool) -> None:
        """Note that no record follows; the log of a killed process may end inside the compile in progress."""
        self._note(self._cut_off() if is_in_progress else iter([Flaw.NO_END]))

    def _note(self, flaws: Iterator[Flaw]) -> None:
        flaw = first(flaws)
        if flaw is not None:
            self.damage = self.damage or Damage(flaw)

    def _cut_off(self) -> Iterator[Flaw]:
        """Flaws of a compile whose last records may be missing: what torch logs before the rest has to be there."""
        names = self.names
        has_more = names != {"recompile_reasons"}
        if self.stack is None and has_more:
            yield Flaw.NO_START
        is_lowered = not names.isdisjoint(_AFTER_THE_GRAPH)
        if is_lowered and "dynamo_output_graph" not in names:
            yield Flaw.NO_GRAPH
        if not names.isdisjoint(_LAST):
            yield Flaw.NO_END
        is_restarted = self.attempt > 0
        if is_restarted and "dynamo_graph_break_reason" not in names:
            yield Flaw.NO_BREAK_REASON

    def _out_of_order(self, item: TraceEvent, time: bytes) -> Damage | None:
        if not self.names and item.name not in _FIRST:
            return Damage(Flaw.FIRST_RECORD, item.name)
        if is_earlier(time, self.time):
            return Damage(Flaw.OUT_OF_ORDER, item.name)
        if item.attempt < self.attempt:
            return Damage(Flaw.EARLIER_ATTEMPT, item.name)
        return None

    def _at_the_end(self, metrics: Mapping[str, Any]) -> Iterator[Flaw]:
        has_failed = bool(metrics.get("fail_type"))
        if self.stack:
            yield from _other_start(self.stack, metrics)
        elif self.stack is None and not has_failed:
            yield Flaw.NO_START
        # An entry of the cache whose objects are gone cannot fail: then torch recompiles without a reason, and says so.
        is_first = self.compile_id.endswith("/0")
        is_recompile = bool(metrics["recompile_reason"]) if "recompile_reason" in metrics else not is_first
        if is_recompile and "recompile_reasons" not in self.names:
            yield Flaw.NO_REASON
        if not self.sources <= self.tensors:
            yield Flaw.NO_TENSOR
        if not has_failed:
            yield from missing_records(self.names, metrics)
            is_restarted = self.attempt > 0
            if "restart_reasons" in metrics:
                reasons = metrics["restart_reasons"] or ()
                is_restarted = _OF_A_BREAK in "".join(reasons)
            if is_restarted and "dynamo_graph_break_reason" not in self.names:
                yield Flaw.NO_BREAK_REASON


def missing_records(names: Set[str], metrics: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Flaw]:
    """What a compile without an error lacks, by the events that it logged and what its metrics count."""
    for rule in _IMPLIED:
        is_lacking = names.isdisjoint(rule.needs)
        is_logged = not names.isdisjoint(rule.after)
        is_counted = bool(metrics.get(rule.counted))
        if is_lacking and (is_logged or is_counted):
            yield rule.flaw


def _other_start(stack: Sequence[UserLine], metrics: Mapping[str, Any]) -> Iterator[Flaw]:
    """Flaws of a compile whose metrics repeat a different stack or function than its start has."""
    files = {line.file for line in stack}
    if UNKNOWN_FILE in files:
        yield Flaw.NO_FILE
    *callers, frame = [f"Line: {line.line}, Name: {line.function}, Filename: {line.file}" for line in stack]
    said = metrics.get("stack_trace") or [*callers, frame]
    # between the callers and the frame the metrics may have lines of torch's own
    repeated = [*said[: len(callers)], said[-1]]
    if repeated != [*callers, frame]:
        yield Flaw.OTHER_STACK
    compiled = stack[-1]
    ours = (compiled.function, compiled.file, compiled.line)
    theirs = (metrics.get("co_name"), metrics.get("co_filename"), metrics.get("co_firstlineno"))
    is_known = None not in theirs
    if is_known and ours != theirs:
        yield Flaw.OTHER_FUNCTION
