"""One record of a trace file -> whether its fields have the types and ranges that torch gives them.

The live process makes its records itself; one from a file may hold anything. Whoever reads an event of a file relies on
what is checked here. A field that no event reads is not looked at.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from tpcompile.evidence.compiles.events import CACHE_EVENTS, FUSION, GRAPH_KINDS, WANTED_EVENTS, name_of
from tpcompile.evidence.records import LaunchedGraph
from tpcompile.evidence.records.reader import value_of

MAX_NUMBER = 2**31
"""Ids, lines and counts are smaller; so are sizes in the number of their digits, which are compared as text."""
JOINT_GRAPH = "aot_joint_graph"
"""Read for its name only: a forward and a backward graph follow."""
SCHEDULE, EXECUTION, TORCH_VERSION = "inductor_collective_schedule", "graph_execution", "torch_version"
BACKWARD_METRICS = "bwd_compilation_metrics"
FILE_EVENTS = WANTED_EVENTS | {JOINT_GRAPH, SCHEDULE, EXECUTION, TORCH_VERSION, BACKWARD_METRICS}
"""What a file is read for. Most of a real log (timings, config dumps, the graphs between two passes) is not in it."""
_OF_COMPILES = FILE_EVENTS - {"str", EXECUTION, TORCH_VERSION}
_IDS = ("frame_id", "frame_compile_id", "attempt", "compiled_autograd_id")
_PLACES = frozenset({"frame_id", "compiled_autograd_id", "stack"})
"""A record has the id of its compile, or else the stack of the call that logged it."""


def is_as_written(metadata: Mapping[str, Any], payload: bytes) -> bool:
    """True for a record whose fields have the right types; of an event that is not known only the ids are checked."""
    name = name_of(metadata)
    ids = [metadata.get(key) for key in _IDS]
    bodies = metadata.keys() & _BODIES.keys()
    is_placed = name not in _OF_COMPILES or not metadata.keys().isdisjoint(_PLACES)
    has_payload = _PAYLOADS.get(name, _has_any)
    is_its_payload = _lowered(payload) == name if name in _LOWERED else has_payload(payload)
    checks = [
        bool(metadata),
        all(map(_is_number_or_none, ids)),
        all(_BODIES[key](metadata[key]) for key in bodies),
        is_placed,
        is_its_payload,
        name != "dynamo_output_graph" or _names_its_nodes(metadata.get(name), payload),
    ]
    return all(checks)


def _has_any(_payload: bytes) -> bool:
    return True


def json_value(text: str | bytes) -> Any | None:
    """The value of JSON text; None for text that is not JSON, nested too deeply, or with a number that is too long.

    None too for JSON with half of a surrogate pair, which no text that torch logs has: it could never be written.
    """
    try:
        return value_of(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        return None


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object in JSON text; empty for any other text."""
    value = json_value(text)
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER  # True is an int, too


def _is_number_or_none(value: object) -> bool:
    return value is None or _is_number(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_texts_or_none(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


def _are_sizes(value: object) -> bool:
    """A size is a number, or the text of a symbol."""
    return isinstance(value, list) and all(type(size) in (int, str) for size in value)


def _is_string(body: object) -> bool:
    """`[text, index]` of the table of strings."""
    if not isinstance(body, list) or len(body) != 2:
        return False
    text, index = body
    return _is_text(text) and _is_number(index)


def _is_file(value: object) -> bool:
    """A name, or its index in the table of strings."""
    return _is_text(value) or _is_number(value)


def _has(fields: Mapping[str, Callable[[object], bool]], *required: str) -> Callable[[object], bool]:
    """A check of a JSON object: each of these fields that it has is right, and the required ones are there."""

    def holds(body: object) -> bool:
        if not isinstance(body, dict) or not body.keys() >= set(required):
            return False
        return all(fields[name](body[name]) for name in fields.keys() & body.keys())

    return holds


def _is_object(body: object) -> bool:
    return isinstance(body, dict)


_is_frame = _has(
    {"line": _is_number, "name": _is_text, "filename": _is_file, "loc": _is_text_or_none}, "line", "name", "filename"
)


def _are_frames(stack: object) -> bool:
    return isinstance(stack, list) and all(map(_is_frame, stack))


_TENSOR = {
    "id": _is_number,
    "describer_id": _is_number,
    "dtype": _is_text,
    "device": _is_text,
    "size": _are_sizes,
    "stride": _are_sizes,
    "requires_grad": lambda value: isinstance(value, bool),
}
_METRICS = {
    **dict.fromkeys(("fail_type", "fail_reason", "fail_user_frame_filename", "recompile_reason"), _is_text_or_none),
    **dict.fromkeys(("co_name", "co_filename", "pytorch_version"), _is_text_or_none),
    **dict.fromkeys(("fail_user_frame_lineno", "co_firstlineno", "graph_op_count", "guard_count"), _is_number_or_none),
    **dict.fromkeys(("restart_reasons", "stack_trace"), _are_texts_or_none),
}
_BODIES: Mapping[str, Callable[[object], bool]] = {
    "str": _is_string,
    "dynamo_start": _has({"stack": _are_frames}),
    "describe_tensor": _has(_TENSOR, "id"),
    "describe_source": _has({"id": _is_number, "describer_id": _is_number, "source": _is_text}, "id", "source"),
    "compilation_metrics": _has(_METRICS),
    "bwd_compilation_metrics": _has(_METRICS),
    "artifact": _has({"name": _is_text}, "name"),
    **dict.fromkeys(GRAPH_KINDS, _is_object),
}
"""Event -> what its value has to be."""


def _is_schedule(payload: bytes) -> bool:
    names = json_value(payload)
    return isinstance(names, list) and all(_is_text(name) and name[:1].isidentifier() for name in names)


def _is_execution(payload: bytes) -> bool:
    order = json_object(payload).get("graph_execution_order")
    return isinstance(order, list) and all(map(_is_object, order))


def _is_version(payload: bytes) -> bool:
    return _is_text(json_object(payload).get("pytorch_version"))


def _is_launched(payload: bytes) -> bool:
    try:
        LaunchedGraph.model_validate(json_object(payload).get("launched"))
    except ValidationError:
        return False
    return True


def _begins(pattern: bytes) -> Callable[[bytes], bool]:
    """A check of a payload that begins like this, possibly behind an empty line."""
    begin = re.compile(rb"\s*(?:" + pattern + rb")")
    return lambda payload: begin.match(payload) is not None


_PARAMETERS = re.compile(rb"\s*class [^\n]+\(torch\.nn\.Module\):\n +def forward\(\n((?: {8}[^\n]*\n)*) +\)")
"""AOTAutograd prints a graph with each parameter on a line of its own, Dynamo with all on the line of `forward`."""


def _lowered(payload: bytes) -> str:
    """The event of a graph of AOTAutograd, by the names of its parameters; empty for any other text."""
    head = _PARAMETERS.match(payload)
    if head is None:
        return ""
    names = set(re.findall(rb"^ +([a-z]+_?)", head[1], re.MULTILINE))
    if {b"primals", b"tangents"} <= names:
        return JOINT_GRAPH
    if b"tangents_" in names:
        return "aot_backward_graph"
    return "aot_forward_graph" if b"primals_" in names else "aot_inference_graph"


def _names_its_nodes(body: object, payload: bytes) -> bool:
    """True for a graph of Dynamo with the node whose size is logged first."""
    sizes = body.get("sizes") if isinstance(body, dict) else None
    if not isinstance(sizes, dict):
        return sizes is None
    return all(name.encode() in payload for name in itertools.islice(sizes, 1))


_LOWERED = GRAPH_KINDS.keys() - {"dynamo_output_graph"} | {JOINT_GRAPH}
_PAYLOADS: Mapping[str, Callable[[bytes], bool]] = {
    SCHEDULE: _is_schedule,
    EXECUTION: _is_execution,
    TORCH_VERSION: _is_version,
    FUSION: _is_launched,
    "dynamo_output_graph": _begins(rb"class [^\n]+\(torch\.nn\.Module\):\n +def forward\(self[,)]"),
    "inductor_output_code": _begins(rb"# |#include|//|import |from "),  # Python, or the C++ of a wrapper
    "dynamo_cpp_guards_str": _begins(rb"TREE_GUARD_MANAGER:"),
    "dynamo_graph_break_reason": _begins(rb"Graph break|WON'T CONVERT"),
    "recompile_reasons": _begins(rb"(?:\[\s*\"?)?!?\d+/\d|\[\s*\]"),  # begin with the compile id; one, or a list
    **dict.fromkeys(CACHE_EVENTS, _begins(rb"\{|\Z")),
}
"""Event besides the lowered graphs -> what its payload has to be, as seen on torch 2.11.0 and 2.13.0.

A payload passes as that of one event only: two records whose payloads were exchanged, with their hashes, would be read
as a program that no rank ran. The outcome of a cache lookup is an exception, since nothing reads its payload."""
