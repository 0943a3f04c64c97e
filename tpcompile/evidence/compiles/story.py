"""Events of one compile in a log, in order -> what contradicts what: evidence that something is missing or was changed.

Payloads are hashed, but no hash covers which records a log has, nor the JSON in front of a payload. What torch logs of
one compile is redundant, though: it begins with a start and ends with metrics, which repeat the stack, the reason, and
how much was traced and lowered. Each rule below compares two records of the same compile. Fields that a version of
torch does not log are not compared. Seen on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tpcompile.evidence.compiles.events import CACHE_EVENTS, GRAPH_KINDS, TraceEvent
from tpcompile.evidence.compiles.record import UNKNOWN_FILE
from tpcompile.evidence.compiles.shapes import BACKWARD_METRICS, JOINT_GRAPH
from tpcompile.evidence.records import UserLine

LOWERED = frozenset(GRAPH_KINDS) - {"dynamo_output_graph"}
CODE = "inductor_output_code"
_AFTER_THE_GRAPH = LOWERED | CACHE_EVENTS | {JOINT_GRAPH, CODE}
INDUCTOR_TIME = "inductor_cumulative_compile_time_us"
"""A field of the metrics: None for a backend besides Inductor. That of AOTAutograd holds the time of any backend."""
_BEFORE_THE_END = frozenset(GRAPH_KINDS) | {
    JOINT_GRAPH,
    "dynamo_start", "describe_tensor", "describe_source", "dynamo_cpp_guards_str", "dynamo_graph_break_reason",
    "recompile_reasons",
}  # fmt: skip
"""Events that torch logs before the metrics of a compile; the code of a backward comes when it first runs."""
_FIRST = frozenset({"recompile_reasons", "dynamo_start", "compilation_metrics"})
_LAST = frozenset({"dynamo_cpp_guards_str", BACKWARD_METRICS})
"""The metrics come right behind the guards, and before any backward."""
_OF_A_BREAK = "For more details about this graph break"
"""In the reason of a restart: the attempt before it ended in a graph break, which is logged."""


_HITS = frozenset(name for name in CACHE_EVENTS if name.endswith("_hit"))


@dataclass(frozen=True)
class _Implied:
    """A record that a compile without an error has to have."""

    says: str
    needs: Set[str]
    """One of these events."""
    counted: str = ""
    """Where this field of the metrics is a number besides 0,"""
    after: Set[str] = frozenset()
    """or one of these events was logged."""


_IMPLIED = (
    _Implied("its graph is missing", {"dynamo_output_graph"}, "graph_op_count", _AFTER_THE_GRAPH),
    _Implied("its guards are missing", {"dynamo_cpp_guards_str"}, "guard_count", {"dynamo_output_graph"}),
    _Implied("its forward graph is missing", {"aot_forward_graph"}, after={JOINT_GRAPH, "aot_backward_graph"}),
    _Implied("its backward graph is missing", {"aot_backward_graph"}, after={JOINT_GRAPH, "aot_forward_graph"}),
    _Implied("its backward graph is missing", {"aot_backward_graph", *_HITS}, after={BACKWARD_METRICS}),
    _Implied("its lowered graphs are missing", LOWERED | _HITS, INDUCTOR_TIME),
    _Implied("its generated code is missing", {CODE, *_HITS}, INDUCTOR_TIME),
    _Implied("what it loaded from a cache is missing", _HITS, "aotautograd_local_cache_hit_count"),
    _Implied("what it loaded from a cache is missing", _HITS, "aotautograd_remote_cache_hit_count"),
    _Implied("what it loaded from a cache is missing", _HITS, "inductor_fx_local_cache_hit_count"),
    _Implied("what it loaded from a cache is missing", _HITS, "inductor_fx_remote_cache_hit_count"),
)


def is_earlier(time: bytes, than: bytes) -> bool:
    """True for a time of a record, `MMDD hh:mm:ss.ffffff`, before that of another; a year ends in between at most."""
    is_new_year = than.startswith(b"12") and time.startswith(b"01")
    return time < than and not is_new_year


def is_before_the_end(name: str) -> bool:
    """True for an event that a compile which has ended no longer logs."""
    return name in _BEFORE_THE_END


@dataclass(slots=True)
class Story:
    """What one compile has logged so far."""

    compile_id: str
    names: set[str] = field(default_factory=set)
    time: bytes = b""
    attempt: int = 0
    stack: Sequence[UserLine] | None = None
    """Of its last start; None without a start."""
    tensors: set[tuple[object, object]] = field(default_factory=set)
    sources: set[tuple[object, object]] = field(default_factory=set)
    contradiction: str = ""
    """The first one, for the reader; empty for none."""

    @property
    def is_ended(self) -> bool:
        """True when the metrics were logged."""
        return "compilation_metrics" in self.names

    def take(self, item: TraceEvent, time: bytes) -> None:
        """Note an event and compare it with what came before; `time` is that of its record."""
        self.contradicted(self._out_of_order(item, time))
        self.time = time
        self.attempt = max(item.attempt, self.attempt)
        self.names.add(item.name)
        if item.name == "describe_tensor":
            self.tensors.add(_described(item))
        elif item.name == "describe_source":
            self.sources.add(_described(item))
        elif item.name == "compilation_metrics":
            self.contradicted(next(self._at_the_end(item.metadata["compilation_metrics"]), ""))
            self.tensors, self.sources, self.stack = set(), set(), None

    def cut(self) -> None:
        """Note that the log ends here, as that of a killed process may: what torch logs before the rest is there."""
        if self.stack is None and self.names != {"recompile_reasons"}:
            self.contradicted("it has no start")
        if "dynamo_output_graph" not in self.names and not self.names.isdisjoint(_AFTER_THE_GRAPH):
            self.contradicted("its graph is missing")
        if not self.names.isdisjoint(_LAST):
            self.contradicted("it has no end")
        if self.attempt > 0 and "dynamo_graph_break_reason" not in self.names:
            self.contradicted("the reason of its graph break is missing")

    def contradicted(self, why: str) -> None:
        """Note a contradiction; of several the first is kept."""
        self.contradiction = self.contradiction or why

    def _out_of_order(self, item: TraceEvent, time: bytes) -> str:
        if not self.names and item.name not in _FIRST:
            return f"its first record is {item.name}"
        if is_earlier(time, self.time):
            return f"{item.name} is out of order"
        if item.attempt < self.attempt:
            return f"{item.name} is of an earlier attempt"
        return ""

    def _at_the_end(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        has_failed = bool(metrics.get("fail_type"))
        yield from self._start(metrics, has_failed=has_failed)
        yield from self._reasons(metrics)
        if not self.sources <= self.tensors:
            yield "a tensor that enters it is not described"
        if not has_failed:
            yield from missing_records(self.names, metrics)
            yield from self._breaks(metrics)

    def _start(self, metrics: Mapping[str, Any], *, has_failed: bool) -> Iterator[str]:
        if self.stack is None and not has_failed:
            yield "it has no start"
        if not self.stack:
            return
        files = {line.file for line in self.stack}
        if UNKNOWN_FILE in files:
            yield "the name of a file in its stack is missing"
        if not _is_same_stack(self.stack, metrics.get("stack_trace")):
            yield "its start and its end have different stacks"
        frame = self.stack[-1]
        ours = {"co_name": frame.function, "co_filename": frame.file, "co_firstlineno": frame.line}
        theirs = {name: metrics.get(name) for name in ours}
        is_known = None not in theirs.values()
        if is_known and ours != theirs:
            yield "its start and its end name different functions"

    def _reasons(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        has_reasons = "recompile_reasons" in self.names
        is_first = self.compile_id.endswith("/0")
        # An entry of the cache whose objects are gone cannot fail: then torch recompiles without a reason, and says so.
        expected = bool(metrics["recompile_reason"]) if "recompile_reason" in metrics else not is_first
        if expected and not has_reasons:
            yield "it is a recompile without a reason"

    def _breaks(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        is_restarted = self.attempt > 0
        if "restart_reasons" in metrics:
            reasons = metrics["restart_reasons"] or ()
            is_restarted = _OF_A_BREAK in "".join(reasons)
        has_reason = "dynamo_graph_break_reason" in self.names
        if is_restarted and not has_reason:
            yield "the reason of its graph break is missing"


def missing_records(names: Set[str], metrics: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """What a compile without an error lacks, by the events that it logged and what its metrics count."""
    for rule in _IMPLIED:
        is_logged = not names.isdisjoint(rule.after)
        is_counted = bool(metrics.get(rule.counted))
        is_expected = is_logged or is_counted
        if is_expected and names.isdisjoint(rule.needs):
            yield rule.says


def _described(item: TraceEvent) -> tuple[object, object]:
    body = item.metadata[item.name]
    return body.get("describer_id"), body.get("id")


def _is_same_stack(stack: Sequence[UserLine], said: Sequence[str] | None) -> bool:
    """True for the stack that the metrics repeat; between the callers and the frame they may have torch's own lines."""
    if not said or not stack:
        return True
    *callers, frame = [f"Line: {line.line}, Name: {line.function}, Filename: {line.file}" for line in stack]
    return frame == said[-1] and callers == said[: len(callers)]
