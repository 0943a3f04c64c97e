"""A payload passes as that of its own event, and of no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpcompile.evidence.compiles.events import CACHE_EVENTS
from tpcompile.evidence.compiles.shapes import EXECUTION, FILE_EVENTS, JOINT_GRAPH, SCHEDULE, is_as_written
from tpcompile.evidence.logs.tracefile import TraceFile

DATA = Path(__file__).parents[2] / "data"
WITHOUT_PAYLOAD = {
    "str", "dynamo_start", "describe_tensor", "describe_source", "compilation_metrics", "bwd_compilation_metrics",
}  # fmt: skip
KINDS = FILE_EVENTS - WITHOUT_PAYLOAD - CACHE_EVENTS
_OP = '        sin: "f32[3]" = torch.ops.aten.sin.default(x);  x = None\n        return (sin,)\n'
PRINTED = [
    ("dynamo_output_graph", "class GraphModule(torch.nn.Module):\n    def forward(self):\n" + _OP),
    ("dynamo_output_graph", 'class GraphModule(torch.nn.Module):\n    def forward(self, s17: "Sym(s17)"):\n' + _OP),
    ("aot_inference_graph", "class <lambda>(torch.nn.Module):\n    def forward(\n        self,\n    ):\n" + _OP),
    (
        JOINT_GRAPH,
        "class inner_f(torch.nn.Module):\n    def forward(\n        self,\n        primals,\n        tangents,\n"
        '    ):\n        primals_1: "f32[3]"  # PlainAOTInput(idx=0)\n' + _OP,
    ),
    (
        "aot_backward_graph",
        'class GraphModule(torch.nn.Module):\n    def forward(\n        self,\n        primals_1: "Sym(s17)",\n'
        '        tangents_1: "f32[3][1]cpu",  # TangentAOTInput(output=PlainAOTOutput(idx=0))\n    ):\n' + _OP,
    ),
    ("inductor_output_code", "import torch\nfrom torch._inductor.codecache import CppWrapperCodeCache\n"),
    ("inductor_output_code", "#include <torch/csrc/inductor/aoti_runtime/interface.h>\n"),
    ("dynamo_graph_break_reason", "Graph break: torch.compile cannot properly resume from this graph break\n"),
    ("dynamo_graph_break_reason", "WON'T CONVERT forward model.py line 3\n"),
    ("recompile_reasons", "!0/1/0: tensor 'x' size mismatch at index 0. expected 2, actual 3"),
    ("recompile_reasons", '[\n"0/1: self.count == 1",\n"0/0: self.count == 0"\n]'),
    ("recompile_reasons", "[\n\n]"),
    (SCHEDULE, '[\n"torch.ops._c10d_functional.all_reduce_.default"\n]'),
    (EXECUTION, json.dumps({"graph_execution_order": [{"compile_id": "0/0"}]})),
    ("tpcompile_fusion", json.dumps({"launched": {"phase": "forward", "is_known": False}})),
]
"""Payloads that the recorded logs have no example of: event and text."""


def recorded() -> Iterator[tuple[str, str]]:
    """Event and text of every payload in the recorded logs."""
    for path in DATA.rglob("*.log"):
        events = [record.event for record in TraceFile(path).records()]
        yield from ((item.name, item.payload) for item in events if item is not None and item.name in KINDS)


def accepted(text: str) -> set[str]:
    """Events as whose payload a text passes."""
    metadata = {"frame_id": 0, "frame_compile_id": 0}
    artifacts = [{"artifact": {"name": name}, **metadata} for name in KINDS]
    plain = [{name: {}, **metadata} for name in KINDS]
    found = zip([*KINDS, *KINDS], [*artifacts, *plain], strict=True)
    return {name for name, record in found if is_as_written(record, text.encode())}


def test_every_recorded_payload_is_that_of_its_own_event_only() -> None:
    payloads = set(recorded())
    assert {name for name, _ in payloads} >= KINDS - {name for name, _ in PRINTED}
    assert [(name, text) for name, text in payloads if accepted(text) != {name}] == []


@pytest.mark.parametrize(("name", "text"), PRINTED)
def test_a_payload_in_a_rare_form_is_that_of_its_own_event_only(name: str, text: str) -> None:
    others = accepted(text) - {name}
    assert name in accepted(text)
    assert others <= ({SCHEDULE} if text == "[\n\n]" else set())  # no reason and no collective are the same text
