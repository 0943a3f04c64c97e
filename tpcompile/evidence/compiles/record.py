"""Trace events of one compile -> its `CompileRecord`."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tpcompile.evidence.compiles.cached_lines import FROM_CACHE, with_current_lines
from tpcompile.evidence.compiles.collectives import collectives_of, issued_at
from tpcompile.evidence.compiles.events import CACHE_EVENTS, CALLED_FROM, FUSION, GRAPH_KINDS, RANK_READS, TraceEvent
from tpcompile.evidence.compiles.normalised import normalised
from tpcompile.evidence.compiles.shapes import json_value
from tpcompile.evidence.compiles.user_lines import with_user_lines
from tpcompile.evidence.iterables import grouped, last
from tpcompile.evidence.records import (
    CompileRecord,
    Graph,
    Guard,
    InputTensor,
    Kernel,
    LaunchedGraph,
    RankRead,
    UserLine,
)
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.records.compile import nodes_of
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.breaks import parse_break
from tpcompile.evidence.text.code import parse_kernels
from tpcompile.evidence.text.fx import parse_graph
from tpcompile.evidence.text.guards import parse_guards
from tpcompile.evidence.text.lines import innermost, users
from tpcompile.evidence.text.normalise import GroupRoles
from tpcompile.evidence.text.reasons import LIMIT

T = TypeVar("T")
UNKNOWN_FILE = "?"
"""The file of a line of a stack whose index is not in the table of strings."""
_DYNAMIC_MARKS = re.compile(r"^dynamo_(?=\w*+$)\w*?(?:dynamic|unbacked|static)")


@functools.lru_cache(maxsize=64)
def _known(
    parse: Callable[..., T], text: str, roles: tuple[tuple[str, str], ...], **options: Any
) -> tuple[T, GroupRoles]:
    met = GroupRoles(dict(roles))
    return parse(text, roles=met, **options), met


def parsed(parse: Callable[..., T], text: str, roles: GroupRoles, **options: Any) -> T:
    """`parse(text, roles=roles, **options)`; texts of the last compiles are parsed once.

    A session makes the record of a compile when it ends, and again whenever all compiles are asked for.
    """
    found: T
    found, met = _known(parse, text, roles.items, **options)
    roles.meet(met)
    return found


def start_stack(start: TraceEvent, table: Mapping[int, str]) -> tuple[UserLine, ...]:
    """The stack of a `dynamo_start`, outermost first; `table` holds the file names torch sent before."""
    frames = start.metadata["dynamo_start"].get("stack", [])
    lines: list[UserLine] = []
    for frame in frames:
        name = frame["filename"]
        file = table.get(name, UNKNOWN_FILE) if isinstance(name, int) else name
        lines.append(_line(file, frame["line"], frame["name"], frame.get("loc") or ""))
    return tuple(lines)


@functools.lru_cache(maxsize=10_000)
def _line(file: str, line: int, function: str, code: str) -> UserLine:
    """One frame of a stack; the outer ones are the same in most compiles of a program."""
    return UserLine(file=file, line=line, function=function, code=code)


@dataclass
class LoggedEvents:
    """Events of one compile, and what is read from them."""

    compile_id: str
    before: TraceEvent | None = None
    """Start of the previous compile of the same frame."""
    events: list[TraceEvent] = field(default_factory=list)

    def all(self, *names: str) -> list[TraceEvent]:
        """Events of these names, in order."""
        return [event for event in self.events if event.name in names]

    def last(self, name: str) -> TraceEvent | None:
        """The last event of that name."""
        return last(self.all(name))

    def of_last_attempt(self, name: str) -> list[TraceEvent]:
        """Events of that name in the last attempt that has any; Dynamo discards the results of earlier attempts."""
        by_attempt = grouped(self.all(name), lambda event: event.attempt)
        return by_attempt[max(by_attempt)] if by_attempt else []

    def payloads(self, name: str) -> list[str]:
        """Payloads of the events of that name."""
        return [event.payload for event in self.all(name)]

    @property
    def start(self) -> TraceEvent | None:
        """Its own `dynamo_start`; a call that exceeded the recompile limit has that of the frame's previous compile."""
        return self.last("dynamo_start") or self.before

    def record(self, roles: GroupRoles, table: Mapping[int, str], *, is_ended: bool) -> CompileRecord:
        """Parse all events; `table` holds the interned file names, with `is_ended` no event will follow."""
        stack = start_stack(self.start, table) if self.start else ()
        graph_events = self.all(*GRAPH_KINDS)
        traced = self.of_last_attempt("dynamo_output_graph")
        if traced:  # Dynamo discards earlier graphs when it restarts
            graph_events = graph_events[graph_events.index(traced[0]) :]
        graphs = tuple(parsed(parse_graph, e.payload, roles, kind=GRAPH_KINDS[e.name]) for e in graph_events)
        guard_text = "".join(self.payloads("dynamo_cpp_guards_str")[-1:])
        files = frozenset(line.file for line in [*stack, *lines_of(nodes_of(graphs))])
        guards = parsed(parse_guards, guard_text, roles, files=files, issued=issued_at(graphs))
        graphs = self.with_lines(graphs, guards)
        began = self.last("dynamo_start") or self.events[0]
        metrics_event = self.last("compilation_metrics")
        metrics = metrics_event.metadata["compilation_metrics"] if metrics_event else {}
        fail_reason = str(metrics.get("fail_reason") or "")
        # torch runs a call beyond the recompile limit in eager, and logs reasons and metrics of it but no start
        is_beyond_limit = fail_reason.startswith(LIMIT) or metrics.get("fail_type") == "FailOnRecompileLimitHit"
        breaks = set(map(parse_break, self.payloads("dynamo_graph_break_reason")))
        reasons = itertools.chain.from_iterable(map(_texts, self.payloads("recompile_reasons")))
        return CompileRecord(
            compile_id=self.compile_id,
            phase=began.phase,
            step=began.step,
            function=stack[-1].function if stack else "",
            line=innermost(stack),  # below a wrapper of torch, as around nn.Sequential, that of the user's caller
            stack=stack,
            called_from=self.called_from(),
            inputs=self.inputs(),
            graphs=graphs,
            guards=guards,
            collectives=collectives_of(graphs),
            kernels=self.kernels(roles),
            launched=self.launched(),
            breaks=tuple(sorted(breaks, key=lambda found: (str(found.line), found.reason))),
            recompile_reasons=tuple(map(normalise.generic, reasons)),
            cache=tuple(event.name for event in self.all(*CACHE_EVENTS)),
            failure=normalise.error(fail_reason),
            failure_line=_failure_line(metrics),
            rank_reads=self.rank_reads(),
            limit_reached=is_beyond_limit,
            is_cut=is_ended and metrics_event is None,
            normalised=normalised((event.name, event.payload) for event in self.events),
        )

    def with_lines(self, graphs: Sequence[Graph], guards: Sequence[Guard]) -> tuple[Graph, ...]:
        """The graphs with the current lines of the user's source."""
        if self.all(FROM_CACHE):
            by_origin = grouped(graphs, lambda graph: graph.kind == "dynamo")
            traced = by_origin.get(True, [])
            lowered = by_origin.get(False, [])
            graphs = with_current_lines(with_user_lines(traced, guards), lowered)
        return with_user_lines(graphs, guards)

    def inputs(self) -> tuple[InputTensor, ...]:
        """Tensors of the last attempt."""
        sources = self.of_last_attempt("describe_source")
        attempts = {source.attempt for source in sources}
        described = [event for event in self.all("describe_tensor") if event.attempt in attempts]
        tensors = {described_tensor(event): event.metadata["describe_tensor"] for event in described}
        constants: dict[str, str] = {}
        inputs: dict[str, InputTensor] = {}
        for event in sources:
            tensor = tensors.get(described_tensor(event))
            if tensor is not None:
                named = str(event.metadata["describe_source"]["source"])
                source = normalise.constant(normalise.generic(named), constants)
                inputs[source] = _input(source, tensor)
        return tuple(dict(sorted(inputs.items())).values())

    def kernels(self, roles: GroupRoles) -> tuple[Kernel, ...]:
        """Kernels of the generated code, forward before backward."""
        codes = [parsed(parse_kernels, code, roles) for code in self.payloads("inductor_output_code")]
        codes.sort(key=lambda part: part[0] == "backward")
        return tuple(kernel for _, kernels in codes for kernel in kernels)

    def launched(self) -> tuple[LaunchedGraph, ...]:
        """What the generated code launches, forward before backward."""
        payloads = map(json.loads, self.payloads(FUSION))
        found = [LaunchedGraph.model_validate(payload["launched"]) for payload in payloads]
        return tuple(sorted(found, key=lambda graph: graph.phase == "backward"))

    def rank_reads(self) -> tuple[RankRead, ...] | None:
        """Reads of the rank in traced code; None when they were not recorded."""
        found = self.payloads(RANK_READS)
        reads = itertools.chain.from_iterable(map(json.loads, found))
        return tuple(dict.fromkeys(map(RankRead.model_validate, reads))) if found else None

    def called_from(self) -> tuple[UserLine, ...]:
        """The program's lines that called the compiled callable; empty where they were not recorded, as in a log."""
        recorded = self.last(CALLED_FROM)
        if recorded is None:
            return ()
        lines = json.loads(recorded.payload)
        return tuple(map(UserLine.model_validate, lines))


def _failure_line(metrics: Mapping[str, Any]) -> UserLine | None:
    file = metrics.get("fail_user_frame_filename")
    line = metrics.get("fail_user_frame_lineno")
    if not file or not line:
        return None
    return users(UserLine(file=str(file), line=int(line)))


def described_tensor(event: TraceEvent) -> tuple[object, object]:
    """The identity of the tensor that an event describes, or gives the source of."""
    body = event.metadata[event.name]
    return body.get("describer_id"), body.get("id")


def _input(source: str, tensor: Mapping[str, Any]) -> InputTensor:
    marks = {name: value for name, value in tensor.items() if value and _DYNAMIC_MARKS.match(name)}
    return InputTensor(
        source=source,
        dtype=str(tensor.get("dtype", "")).removeprefix("torch."),
        shape=str(tensor.get("size", "")),
        stride=str(tensor.get("stride", "")),
        device=normalise.device(str(tensor.get("device", ""))),
        requires_grad=bool(tensor.get("requires_grad", False)),
        dynamic=json.dumps(marks, sort_keys=True) if marks else "",
    )


def _texts(payload: str) -> list[str]:
    """A JSON list of strings; any other payload is one string."""
    data = json_value(payload)
    if data is None:
        return [payload]
    texts = data if isinstance(data, list) else [data]
    return list(map(str, texts))
