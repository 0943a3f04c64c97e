"""One raw record of torch's trace logger -> `TraceEvent`. Event names and metadata seen on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Frozen, Layer

GRAPH_KINDS = {
    "dynamo_output_graph": "dynamo",
    "aot_forward_graph": "forward",
    "aot_inference_graph": "inference",
    "aot_backward_graph": "backward",
}
OBSERVED_IN: dict[str, tuple[Layer, str]] = {
    "describe_source": (Layer.INPUTS, ""),
    "dynamo_output_graph": (Layer.GRAPH, ""),
    "dynamo_cpp_guards_str": (Layer.GUARDS, ""),
    "aot_forward_graph": (Layer.LOWERED, "forward"),
    "aot_inference_graph": (Layer.LOWERED, "forward"),
    "aot_backward_graph": (Layer.LOWERED, "backward"),
    "inductor_output_code": (Layer.KERNELS, "forward"),
}
"""Event -> the layer, and the part of it, that its text is of."""
CACHE_EVENTS = frozenset(
    f"{cache}_{outcome}" for cache in ("fx_graph_cache", "aotautograd_cache") for outcome in ("hit", "miss", "bypass")
)
FUSION = "tpcompile_fusion"
"""An artifact of tpcompile's own: the manifest of a graph that Inductor generated code for, and its launches."""
WANTED_EVENTS = frozenset(GRAPH_KINDS) | CACHE_EVENTS | {
    "str", "dynamo_start", "describe_tensor", "describe_source", "dynamo_cpp_guards_str", "recompile_reasons",
    "dynamo_graph_break_reason", "inductor_output_code", "compilation_metrics", FUSION,
}  # fmt: skip
"""Events the parser reads; everything else is dropped at the source."""
RANK_READS = "tpcompile_rank_reads"
"""An event of tpcompile's own, which torch's trace lacks: reads of the rank in the code behind an output graph."""
CALLED_FROM = "tpcompile_called_from"
"""An event of tpcompile's own: the program's lines that called the compiled callable, outermost first; torch leaves out
the last."""

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
    name = name_of(metadata)
    if name not in wanted:
        return None
    is_cache_event = name in CACHE_EVENTS  # only the outcome is needed, the cache key is 60 kB
    text = "" if payload is None or is_cache_event else payload
    return TraceEvent(
        name=name,
        metadata=metadata,
        payload=text,
        compile_id=compile_id_of(metadata),
        attempt=int(metadata.get("attempt") or 0),
        phase=phase,
        step=step,
    )


def name_of(metadata: Mapping[str, Any]) -> str:
    """The key that names the kind of record; of an artifact, its own name."""
    name = find(metadata, lambda key: key not in RESERVED) or ""
    body = metadata.get(name)
    if name == "artifact" and isinstance(body, Mapping):
        return str(body.get("name", ""))
    return name


def compile_id_of(metadata: Mapping[str, Any]) -> str | None:
    """`1/0` of frame 1, or `!0/1/0` inside of compiled autograd; None for a record of no compile."""
    frame = metadata.get("frame_id")
    if frame is None:
        return None
    number = metadata.get("frame_compile_id")
    autograd = metadata.get("compiled_autograd_id")
    prefix = "" if autograd is None else f"!{autograd}/"
    return f"{prefix}{frame}/{number}"


TRACED = frozenset({"dynamo_output_graph", "dynamo_graph_break_reason"})
"""Events at which the traced code is still known; a graph break before the first op leaves no graph."""


def event_beside(at: TraceEvent, name: str, records: Iterable[Frozen]) -> TraceEvent:
    """An event of tpcompile's own (`RANK_READS`, `CALLED_FROM`) with these records, of the same compile and attempt."""
    payload = json.dumps([record.model_dump(mode="json") for record in records])
    return replace(at, name=name, metadata={}, payload=payload)
