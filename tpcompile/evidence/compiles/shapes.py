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
    bodies = metadata.keys() & _FIELDS.keys()
    is_placed = name not in _OF_COMPILES or not metadata.keys().isdisjoint(_PLACES)
    checks = [
        bool(metadata),
        all(_fits(metadata.get(key), _NUMBER_OR_NONE) for key in _IDS),
        all(_is_body(key, metadata[key]) for key in bodies),
        "str" not in metadata or _is_string(metadata["str"]),
        is_placed,
        _is_payload(name, payload),
        name != "dynamo_output_graph" or _names_its_nodes(metadata.get(name), payload),
    ]
    return all(checks)


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


_Types = frozenset[type]
_NUMBER: _Types = frozenset({int})
_TEXT: _Types = frozenset({str})
_NUMBER_OR_NONE = _NUMBER | {type(None)}
_TEXT_OR_NONE = _TEXT | {type(None)}
_FRAME = "frame of a stack"
_METRICS = {
    **dict.fromkeys(("fail_type", "fail_reason", "fail_user_frame_filename", "recompile_reason"), _TEXT_OR_NONE),
    **dict.fromkeys(("co_name", "co_filename", "pytorch_version"), _TEXT_OR_NONE),
    **dict.fromkeys(("fail_user_frame_lineno", "co_firstlineno", "graph_op_count", "guard_count"), _NUMBER_OR_NONE),
}
_FIELDS: Mapping[str, Mapping[str, _Types]] = {
    "dynamo_start": {},
    # the name of a file is in the table of strings, where it has a number
    _FRAME: {"line": _NUMBER, "name": _TEXT, "filename": _TEXT | _NUMBER, "loc": _TEXT_OR_NONE},
    "describe_tensor": {
        **dict.fromkeys(("id", "describer_id"), _NUMBER),
        **dict.fromkeys(("dtype", "device"), _TEXT),
        "requires_grad": frozenset({bool}),
    },
    "describe_source": {"id": _NUMBER, "describer_id": _NUMBER, "source": _TEXT},
    "compilation_metrics": _METRICS,
    BACKWARD_METRICS: _METRICS,
    "artifact": {"name": _TEXT},
    **{kind: {} for kind in GRAPH_KINDS},
}
"""Event, or a frame of a stack -> types of the fields that are read."""
_LISTS: Mapping[str, tuple[_Types, bool]] = {
    **dict.fromkeys(("size", "stride"), (_NUMBER | _TEXT, False)),  # a size is a number, or the text of a symbol
    **dict.fromkeys(("restart_reasons", "stack_trace"), (_TEXT, True)),
}
"""Field that is a list -> types of its elements, and whether it may be None."""
_REQUIRED: Mapping[str, set[str]] = {
    _FRAME: {"line", "name", "filename"},
    "describe_tensor": {"id"},
    "describe_source": {"id", "source"},
    "artifact": {"name"},
}


def _fits(value: object, types: _Types) -> bool:
    """True for a value of one of these types; a number is an id, a line or a count."""
    if type(value) is int and not 0 <= value < MAX_NUMBER:
        return False
    return type(value) in types  # True is an int, too


def _is_body(name: str, body: object) -> bool:
    """True for the value of an event, each of whose fields has the right type."""
    if not isinstance(body, dict):
        return False
    fields = _FIELDS[name]
    required = _REQUIRED.get(name, set())
    checks = [body.keys() >= required]
    checks += [_fits(body[field], fields[field]) for field in fields.keys() & body.keys()]
    for field in _LISTS.keys() & body.keys():
        types, is_optional = _LISTS[field]
        values = body[field]
        is_list = isinstance(values, list) and types.issuperset(map(type, values))
        checks.append(is_list or (is_optional and values is None))
    if not all(checks):
        return False
    return name != "dynamo_start" or _is_list(body.get("stack", []), lambda frame: _is_body(_FRAME, frame))


def _is_list(values: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(values, list) and all(map(holds, values))


def _is_string(body: object) -> bool:
    """`[text, index]` of the table of strings."""
    if not isinstance(body, list) or len(body) != 2:
        return False
    text, index = body
    return _fits(text, _TEXT) and _fits(index, _NUMBER)


def _is_payload(name: str, payload: bytes) -> bool:
    """True for the payload of that event.

    No payload passes as that of two events: two records whose payloads were exchanged, with their hashes, would be read
    as a program that no rank ran. The outcome of a cache lookup is an exception, since nothing reads its payload.
    """
    if name in _LOWERED:
        return _lowered(payload) == name
    if name in _BEGINNINGS:
        return _BEGINNINGS[name].match(payload) is not None
    if name == SCHEDULE:
        # names of ops; recompile reasons, a list of texts too, begin with a number
        return _is_list(json_value(payload), lambda op: isinstance(op, str) and op[:1].isidentifier())
    if name == EXECUTION:
        order = json_object(payload).get("graph_execution_order")
        return _is_list(order, lambda entry: isinstance(entry, dict))
    if name == TORCH_VERSION:
        return _fits(json_object(payload).get("pytorch_version"), _TEXT)
    if name == FUSION:
        try:
            LaunchedGraph.model_validate(json_object(payload).get("launched"))
        except ValidationError:
            return False
    return True


_LOWERED = GRAPH_KINDS.keys() - {"dynamo_output_graph"} | {JOINT_GRAPH}
_BEGINNINGS: Mapping[str, re.Pattern[bytes]] = {
    "dynamo_output_graph": re.compile(rb"\A\s*+class [^\n]+\(torch\.nn\.Module\):\n +def forward\(self[,)]"),
    "inductor_output_code": re.compile(rb"\A\s*+(?:# |#include|//|import |from )"),  # Python, or the C++ of a wrapper
    "dynamo_cpp_guards_str": re.compile(rb"\A\s*+TREE_GUARD_MANAGER:"),
    "dynamo_graph_break_reason": re.compile(rb"\A\s*+(?:Graph break|WON'T CONVERT)"),
    "recompile_reasons": re.compile(rb"\A\s*+(?:(?:\[\s*\"?)?!?\d+/\d|\[\s*\])"),  # one with its compile id, or a list
    **dict.fromkeys(CACHE_EVENTS, re.compile(rb"\A\s*+(?:\{|\Z)")),
}
"""Event -> how its payload begins, as seen on torch 2.11.0 and 2.13.0."""
_PARAMETERS = re.compile(rb"\A\s*+class [^\n]+\(torch\.nn\.Module\):\n +def forward\(\n((?: {8}[^\n]*\n)*) +\)")
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
