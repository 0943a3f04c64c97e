"""Structured-trace events, live or from a TORCH_TRACE file -> `CompileRecord`s.

The one parser of torch's structured trace. A live handler and a log file both give `TraceEvent`s; from there on
nothing knows which it was. Event names and metadata seen on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpcompile.evidence.collectives import collectives_of, is_library
from tpcompile.evidence.incidental import normalised
from tpcompile.evidence.records import CompileRecord, GraphBreak, InputTensor, Kernel, RankRead, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.code import parse_kernels
from tpcompile.evidence.text.fx import parse_graph
from tpcompile.evidence.text.guards import parse_guards
from tpcompile.evidence.text.lines import innermost_own
from tpcompile.evidence.text.normalise import GroupRoles
from tpcompile.evidence.userlines import with_user_lines

GRAPH_KINDS = {
    "dynamo_output_graph": "dynamo",
    "aot_forward_graph": "forward",
    "aot_inference_graph": "inference",
    "aot_backward_graph": "backward",
}
CACHE_EVENTS = frozenset(
    f"{cache}_{outcome}" for cache in ("fx_graph_cache", "aotautograd_cache") for outcome in ("hit", "miss", "bypass")
)
WANTED_EVENTS = frozenset(GRAPH_KINDS) | CACHE_EVENTS | {
    "str", "dynamo_start", "describe_tensor", "describe_source", "dynamo_cpp_guards_str", "recompile_reasons",
    "dynamo_graph_break_reason", "inductor_output_code", "compilation_metrics",
}  # fmt: skip
"""Events the parser reads; everything else is dropped at the source."""
RANK_READS = "tpcompile_rank_reads"
"""Our own event, for what torch's trace lacks: reads of the rank in traced code."""

RESERVED = frozenset({
    "rank", "compiled_autograd_id", "frame_id", "frame_compile_id", "attempt", "severity", "timestamp", "pathname",
    "thread", "subgraph_name", "has_payload", "stack", "lineno",
})  # fmt: skip
_BREAK_AT = re.compile(r"Graph break in user code at (?P<file>.+):(?P<line>\d+)")
_BREAK_REASON = re.compile(r"Graph Break Reason: (?P<reason>.*)")
_BREAK_FUNCTION = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s+(?P<code>.*)')
_DYNAMIC_MARKS = re.compile(r"^dynamo_\w*(dynamic|unbacked|static)\w*$")


@dataclass(frozen=True)
class TraceEvent:
    """One event of the structured trace."""

    name: str
    metadata: Mapping[str, Any]
    payload: str
    compile_id: str | None
    attempt: int
    phase: str = ""
    step: int | None = None


def event(
    metadata: Mapping[str, Any],
    payload: str | None,
    *,
    phase: str = "",
    step: int | None = None,
    wanted: frozenset[str] = WANTED_EVENTS,
) -> TraceEvent | None:
    """One raw record of torch's trace logger -> event, or None for a kind that is not `wanted`."""
    name = next((key for key in metadata if key not in RESERVED), "")
    body = metadata.get(name)
    if name == "artifact" and isinstance(body, Mapping):
        name = str(body.get("name", ""))
    if name not in wanted:
        return None
    frame, again = metadata.get("frame_id"), metadata.get("frame_compile_id")
    prefix = metadata.get("compiled_autograd_id")
    compile_id = None if frame is None else f"{'' if prefix is None else f'!{prefix}/'}{frame}/{again}"
    return TraceEvent(
        name=name,
        metadata=metadata,
        payload="" if name in CACHE_EVENTS else payload or "",  # of a cache only the outcome counts, its key is 60 kB
        compile_id=compile_id,
        attempt=int(metadata.get("attempt") or 0),
        phase=phase,
        step=step,
    )


TRACED = frozenset({"dynamo_output_graph", "dynamo_graph_break_reason"})
"""Events at which torch still knows what it traced; a break before the first op leaves no graph."""


def rank_reads_event(at: TraceEvent, reads: Iterable[RankRead]) -> TraceEvent:
    """Reads of the rank in the code behind an output graph, as an event of the same compile and attempt."""
    payload = json.dumps([read.model_dump(mode="json") for read in reads])
    return replace(at, name=RANK_READS, metadata={}, payload=payload)


@dataclass
class _Compile:
    """Events of one compile id, sorted into what a record needs."""

    compile_id: str
    before: TraceEvent | None = None
    """Start of the compile before of the same frame."""
    events: list[TraceEvent] = field(default_factory=list)

    def last(self, name: str) -> TraceEvent | None:
        return next((e for e in reversed(self.events) if e.name == name), None)

    def all(self, name: str) -> list[TraceEvent]:
        return [e for e in self.events if e.name == name]


class CompileNumbers:
    """Which compile of a rank an event belongs to: after torch.compiler.reset() compile ids begin again at 0/0."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._of_frame: dict[str, int] = {}
        self._names: list[set[str]] = []
        self.before: list[int | None] = []
        """By compile: the compile before of the same frame."""

    def __call__(self, item: TraceEvent) -> int:
        """The number of the compile, from 0; a new number is one more than the last."""
        assert item.compile_id is not None, "only an event of a compile has a number"
        number = self._latest.get(item.compile_id)
        if number is None or self._is_again(item, self._names[number]):
            frame = item.compile_id.rpartition("/")[0]
            number = len(self._names)
            self.before.append(self._of_frame.get(frame))
            self._latest[item.compile_id] = self._of_frame[frame] = number
            self._names.append(set())
        self._names[number].add(item.name)
        return number

    @staticmethod
    def _is_again(item: TraceEvent, names: set[str]) -> bool:
        """True when a compile id starts over; the reasons of a recompile come before its start."""
        if item.name == "recompile_reasons":
            return "compilation_metrics" in names
        return item.name == "dynamo_start" and item.attempt == 0 and "dynamo_start" in names


def compile_records(
    events: Iterable[TraceEvent],
    *,
    roles: Mapping[str, str],
    strings: Mapping[int, str] | None = None,
    is_ended: bool = False,
) -> tuple[CompileRecord, ...]:
    """Events of one rank, in order -> its compiles, in order of their first event.

    `roles` maps process-group names to mesh roles; `strings` is the table of interned file names, for a live
    source that started to listen after torch had sent some of them. `is_ended` says that no event will follow:
    a compile without its last event is marked as cut.
    """
    table = dict(strings or {})
    compiles: list[_Compile] = []
    number_of = CompileNumbers()
    starts: dict[int, TraceEvent] = {}
    for item in events:
        if item.name == "str":
            text, index = item.metadata["str"]
            table[int(index)] = str(text)
        elif item.compile_id is not None:
            number = number_of(item)
            if number == len(compiles):
                before = number_of.before[number]
                start = starts.get(before) if before is not None else None
                compiles.append(_Compile(item.compile_id, start))
                starts |= {number: start} if start else {}
            if item.name == "dynamo_start":
                starts[number] = item
            compiles[number].events.append(item)
    group_roles = GroupRoles(roles)
    return tuple(_record(compile_, group_roles, table, is_ended=is_ended) for compile_ in compiles)


def compile_record(
    events: Sequence[TraceEvent], *, before: TraceEvent | None, roles: GroupRoles, strings: Mapping[int, str]
) -> CompileRecord:
    """Events of one compile in a finished log -> its record; `before` started the compile before of its frame."""
    compile_ = _Compile(str(events[0].compile_id), before, list(events))
    return _record(compile_, roles, strings, is_ended=True)


def _record(compile_: _Compile, roles: GroupRoles, table: Mapping[int, str], *, is_ended: bool) -> CompileRecord:
    stack = _stack(compile_, table)
    graphs = tuple(parse_graph(e.payload, kind=GRAPH_KINDS[e.name], roles=roles) for e in _graph_events(compile_))
    files = {line.file for line in stack} | {n.line.file for g in graphs for n in g.nodes if n.line}
    guards_event = compile_.last("dynamo_cpp_guards_str")
    guards = parse_guards(guards_event.payload, roles=roles, files=files) if guards_event else ()
    graphs = with_user_lines(graphs, guards)
    start = compile_.last("dynamo_start") or compile_.events[0]
    return CompileRecord(
        compile_id=compile_.compile_id,
        phase=start.phase,
        step=start.step,
        function=stack[-1].function if stack else "",
        line=frame_line(stack),
        stack=stack,
        inputs=_inputs(compile_),
        graphs=graphs,
        guards=guards,
        collectives=collectives_of(graphs),
        kernels=_kernels(compile_, roles),
        breaks=_breaks(compile_),
        recompile_reasons=_recompile_reasons(compile_),
        cache=tuple(e.name for e in compile_.events if e.name in CACHE_EVENTS),
        failure=_failure(compile_),
        failure_line=_failure_line(compile_),
        rank_reads=_rank_reads(compile_),
        limit_reached=_limit_reached(compile_),
        is_cut=is_ended and compile_.last("compilation_metrics") is None,
        normalised=normalised((e.name, e.payload) for e in compile_.events),
    )


def _graph_events(compile_: _Compile) -> list[TraceEvent]:
    """Graphs from the last attempt's Dynamo graph on: a restart after tracing throws the earlier ones away."""
    found = [e for e in compile_.events if e.name in GRAPH_KINDS]
    last = max((e.attempt for e in found if e.name == "dynamo_output_graph"), default=0)
    first = next((i for i, e in enumerate(found) if e.name == "dynamo_output_graph" and e.attempt == last), 0)
    return found[first:]


def _stack(compile_: _Compile, table: Mapping[int, str]) -> tuple[UserLine, ...]:
    # A call that exceeded the recompile limit has no start: its frame is that of the compile before.
    start = compile_.last("dynamo_start") or compile_.before
    return start_stack(start, table) if start else ()


def start_stack(start: TraceEvent, table: Mapping[int, str]) -> tuple[UserLine, ...]:
    """The stack of a `dynamo_start`, outermost first; `table` holds the file names torch sent before."""
    frames = start.metadata["dynamo_start"].get("stack", [])
    return tuple(
        UserLine(
            file=table.get(frame["filename"], "?") if isinstance(frame["filename"], int) else frame["filename"],
            line=frame["line"],
            function=frame["name"],
            code=frame.get("loc") or "",
        )
        for frame in frames
    )


def frame_line(stack: Sequence[UserLine]) -> UserLine | None:
    """The line of the compiled frame; below a wrapper of torch, as around nn.Sequential, that of the user's caller."""
    own = [line for line in stack if not is_library(line)]
    if own:
        return own[-1]
    return stack[-1] if stack else None


def _inputs(compile_: _Compile) -> tuple[InputTensor, ...]:
    """Tensors of the last attempt: an earlier attempt saw the same frame and was thrown away."""
    sources = compile_.all("describe_source")
    last = max((e.attempt for e in sources), default=0)
    tensors = {
        _described(e): e.metadata["describe_tensor"] for e in compile_.all("describe_tensor") if e.attempt == last
    }
    inputs: dict[str, InputTensor] = {}
    constants: dict[str, str] = {}
    for found in sources:
        body = found.metadata["describe_source"]
        tensor = tensors.get((body.get("describer_id"), body.get("id")))
        if found.attempt == last and tensor is not None:
            source = normalise.constant(normalise.generic(str(body["source"])), constants)
            inputs[source] = _input(source, tensor)
    return tuple(inputs[source] for source in sorted(inputs))


def _described(found: TraceEvent) -> tuple[Any, Any]:
    body = found.metadata["describe_tensor"]
    return body.get("describer_id"), body.get("id")


def _input(source: str, tensor: Mapping[str, Any]) -> InputTensor:
    marks = {key: tensor[key] for key in sorted(tensor) if _DYNAMIC_MARKS.match(key) and tensor[key]}
    return InputTensor(
        source=source,
        dtype=str(tensor.get("dtype", "")).removeprefix("torch."),
        shape=str(tensor.get("size", "")),
        stride=str(tensor.get("stride", "")),
        device=normalise.device(str(tensor.get("device", ""))),
        requires_grad=bool(tensor.get("requires_grad", False)),
        dynamic=json.dumps(marks, sort_keys=True) if marks else "",
    )


def _kernels(compile_: _Compile, roles: GroupRoles) -> tuple[Kernel, ...]:
    by_phase: dict[str, tuple[Kernel, ...]] = {}
    for found in compile_.all("inductor_output_code"):
        phase, kernels = parse_kernels(found.payload, roles=roles)
        by_phase[phase] = by_phase.get(phase, ()) + kernels
    return by_phase.get("forward", ()) + by_phase.get("backward", ())


def _breaks(compile_: _Compile) -> tuple[GraphBreak, ...]:
    found = {parse_break(e.payload) for e in compile_.all("dynamo_graph_break_reason")}
    return tuple(sorted(found, key=lambda b: (str(b.line), b.reason)))


def parse_break(text: str) -> GraphBreak:
    """Text of a graph break -> reason on one line, and the user's line."""
    at, reason = _BREAK_AT.search(text), _BREAK_REASON.search(text)
    detail = [line.strip() for line in text.splitlines() if line.strip()]
    explanation = next((d for d in detail if d.startswith("Explanation:")), "")
    what = " ".join(filter(None, [reason["reason"].strip() if reason else detail[0] if detail else "", explanation]))
    stack = tuple(
        UserLine(file=m["file"], line=int(m["line"]), function=m["function"], code=m["code"].strip())
        for m in _BREAK_FUNCTION.finditer(text)
    )
    line = _break_line(at, stack)
    return GraphBreak(reason=normalise.generic(what), line=line, stack=stack)


def _break_line(at: re.Match[str] | None, stack: Sequence[UserLine]) -> UserLine | None:
    """The user's line; None where the break is in torch and the log does not say who called it."""
    if at is None:
        return innermost_own(stack)
    here = [line for line in stack if (line.file, line.line) == (at["file"], int(at["line"]))]
    innermost = here[-1] if here else UserLine(file=at["file"], line=int(at["line"]))
    return innermost_own(stack) if is_library(innermost) else innermost


def _recompile_reasons(compile_: _Compile) -> tuple[str, ...]:
    reasons: list[str] = []
    for found in compile_.all("recompile_reasons"):
        try:
            data = json.loads(found.payload)
        except json.JSONDecodeError:
            data = found.payload
        reasons += [str(r) for r in data] if isinstance(data, list) else [str(data)]
    return tuple(normalise.generic(reason) for reason in reasons)


def _rank_reads(compile_: _Compile) -> tuple[RankRead, ...] | None:
    found = compile_.all(RANK_READS)
    reads = (RankRead.model_validate(read) for e in found for read in json.loads(e.payload))
    return tuple(dict.fromkeys(reads)) if found else None


def _metrics(compile_: _Compile) -> Mapping[str, Any]:
    found = compile_.last("compilation_metrics")
    body = found.metadata["compilation_metrics"] if found else {}
    return body if isinstance(body, Mapping) else {}


def _failure(compile_: _Compile) -> str:
    return normalise.error(str(_metrics(compile_).get("fail_reason") or ""))


def _failure_line(compile_: _Compile) -> UserLine | None:
    metrics = _metrics(compile_)
    file, line = metrics.get("fail_user_frame_filename"), metrics.get("fail_user_frame_lineno")
    found = UserLine(file=str(file), line=int(line)) if file and line else None
    return None if found is None or is_library(found) else found


def _limit_reached(compile_: _Compile) -> bool:
    """Torch gave up on the frame: it emits reasons and metrics but no start, and runs the frame eager."""
    metrics = _metrics(compile_)
    return metrics.get("fail_type") == "FailOnRecompileLimitHit" or str(metrics.get("fail_reason") or "").startswith(
        "Dynamo recompile limit exceeded"
    )
