"""One raw record of torch's trace logger -> `TraceEvent`. Event names and metadata seen on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpcompile.evidence.records import RankRead
from tpcompile.evidence.several import find

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
    name = _name(metadata)
    if name not in wanted:
        return None
    is_read = name not in CACHE_EVENTS  # of a cache only the outcome counts, its key is 60 kB
    return TraceEvent(
        name=name,
        metadata=metadata,
        payload=(payload or "") if is_read else "",
        compile_id=_compile_id(metadata),
        attempt=int(metadata.get("attempt") or 0),
        phase=phase,
        step=step,
    )


def _name(metadata: Mapping[str, Any]) -> str:
    """The key that says what the record is; an artifact has a name of its own."""
    name = find(metadata, lambda key: key not in RESERVED) or ""
    body = metadata.get(name)
    if name == "artifact" and isinstance(body, Mapping):
        return str(body.get("name", ""))
    return name


def _compile_id(metadata: Mapping[str, Any]) -> str | None:
    frame, again = metadata.get("frame_id"), metadata.get("frame_compile_id")
    if frame is None:
        return None
    autograd = metadata.get("compiled_autograd_id")
    prefix = "" if autograd is None else f"!{autograd}/"
    return f"{prefix}{frame}/{again}"


TRACED = frozenset({"dynamo_output_graph", "dynamo_graph_break_reason"})
"""Events at which torch still knows what it traced; a break before the first op leaves no graph."""


def rank_reads_event(at: TraceEvent, reads: Iterable[RankRead]) -> TraceEvent:
    """Reads of the rank in the code behind an output graph, as an event of the same compile and attempt."""
    payload = json.dumps([read.model_dump(mode="json") for read in reads])
    return replace(at, name=RANK_READS, metadata={}, payload=payload)
