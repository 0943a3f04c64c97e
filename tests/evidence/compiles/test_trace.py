"""Structured-trace events, live or from a file -> compile records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.traces import read_trace_file
from tpcompile.evidence.compiles.events import TraceEvent, event
from tpcompile.evidence.compiles.trace import compile_records
from tpcompile.evidence.records import CompileRecord
from tpcompile.evidence.text.breaks import parse_break

GRAPH = (
    "class GraphModule(torch.nn.Module):\n    def forward(self, L_x_):\n        a = L_x_ * {}\n        return (a,)\n"
)
STACK = [
    {"line": 9, "name": "<module>", "filename": 1, "loc": "y = model(x)"},
    {"line": 3, "name": "forward", "filename": 2, "loc": "def forward(self, x):"},
]

Raw = tuple[dict[str, Any], str | None]


def raw(name: str, body: Any = None, payload: str | None = None, *, frame: str = "0/0", attempt: int = 0) -> Raw:
    """One record as torch's trace logger gets it."""
    metadata: dict[str, Any] = {name: {} if body is None else body, "rank": 0}
    if name != "str":
        frame_id, again = map(int, frame.split("/"))
        metadata |= {"frame_id": frame_id, "frame_compile_id": again, "attempt": attempt}
    if payload is not None:
        metadata["has_payload"] = hashlib.md5(payload.encode()).hexdigest()
    return metadata, payload


def artifact(name: str, payload: str, **where: Any) -> Raw:
    """One record of kind artifact."""
    return raw("artifact", {"name": name, "encoding": "json"}, payload, **where)


def tensor(source: str, number: int, shape: list[int], **where: Any) -> list[Raw]:
    """The two records that describe one input."""
    body = {"id": number, "describer_id": 0, "size": shape, "stride": [1] * len(shape), "dtype": "torch.float32",
            "device": "device(type='cuda', index=3)", "view_func": "<f at 0x7f00112233>"}  # fmt: skip
    return [raw("describe_tensor", body, **where),
            raw("describe_source", {"describer_id": 0, "id": number, "source": source}, **where)]  # fmt: skip


def start(**where: Any) -> Raw:
    """Start of a compile."""
    return raw("dynamo_start", {"stack": STACK}, **where)


def program(factor: int = 2, **where: Any) -> list[Raw]:
    """A whole small compile."""
    return [
        start(**where),
        *tensor("L['x']", 0, [4, 8], **where),
        raw("dynamo_output_graph", {"sizes": {}}, GRAPH.format(factor), **where),
        raw(
            "dynamo_cpp_guards_str",
            {},
            "TREE_GUARD_MANAGER:\n+- RootGuardManager\n| +- EQUALS_MATCH: G['k'] == 2\n",
            **where,
        ),
    ]


NAMES = [raw("str", ["/app/run.py", 1]), raw("str", ["/app/model.py", 2])]


def records(*found: Raw, strings: dict[int, str] | None = None) -> tuple[CompileRecord, ...]:
    """Records of a live source."""
    events = [e for metadata, payload in found if (e := event(metadata, payload, phase="first"))]
    return compile_records(events, roles={"0": "tp"}, strings=strings)


def write(path: Path, *found: Raw) -> Path:
    """The file TORCH_TRACE would hold, in torch's own format."""
    lines = []
    for number, (metadata, payload) in enumerate(found):
        lines.append(f"V1121 03:57:12.{number:06d} 4242 torch/_dynamo/x.py:915] {json.dumps(metadata)}")
        lines += [] if payload is None else [f"\t{line}" for line in payload.split("\n")]
    path.write_text("\n".join(lines) + "\n")
    return path


def from_file(path: Path) -> tuple[CompileRecord, ...]:
    """Records of a file."""
    return compile_records(read_trace_file(path), roles={"0": "tp"})


def without_phase(found: tuple[CompileRecord, ...]) -> list[CompileRecord]:
    """A file does not know the phases of the run."""
    return [c.model_copy(update={"phase": ""}) for c in found]


def test_a_compile_has_frame_line_stack_inputs_graph_and_guards() -> None:
    (found,) = records(*NAMES, *program())
    assert (found.compile_id, found.function, str(found.line)) == ("0/0", "forward", "/app/model.py:3 in forward")
    assert [str(line) for line in found.stack] == ["/app/run.py:9 in <module>", "/app/model.py:3 in forward"]
    assert [(i.source, i.dtype, i.shape, i.device) for i in found.inputs] == [
        ("L['x']", "float32", "[4, 8]", "device(type='cuda')")
    ]
    assert [g.kind for g in found.graphs] == ["dynamo"]
    assert [g.expression for g in found.guards] == ["G['k'] == 2"]


def test_events_that_are_not_read_are_dropped_at_the_source() -> None:
    assert event({"chromium_event": {}, "frame_id": 0, "frame_compile_id": 0}, "{}") is None
    assert event({"artifact": {"name": "something else"}, "frame_id": 0, "frame_compile_id": 0}, "{}") is None


def test_a_live_source_that_started_late_gets_file_names_from_the_string_table() -> None:
    (found,) = records(*program(), strings={1: "/app/run.py", 2: "/app/model.py"})
    assert str(found.line) == "/app/model.py:3 in forward"


def test_an_unknown_file_name_is_a_question_mark() -> None:
    assert str(records(*program())[0].line) == "?:3 in forward"


def test_inputs_are_those_of_the_last_attempt() -> None:
    (found,) = records(
        *NAMES, start(), *tensor("L['x']", 0, [4, 8]), *tensor("L['gone']", 1, [2]),
        start(attempt=1), *tensor("L['x']", 0, [5, 8], attempt=1),
    )  # fmt: skip
    assert [(i.source, i.shape) for i in found.inputs] == [("L['x']", "[5, 8]")]


def test_a_graph_that_a_restart_threw_away_is_not_in_the_record() -> None:
    (found,) = records(*NAMES, *program(factor=2), *program(factor=3, attempt=1))
    assert [g.nodes[1].args for g in found.graphs] == [("%0", "3")]


def test_a_restart_before_any_graph_keeps_the_graphs_of_the_last_attempt() -> None:
    (found,) = records(
        *NAMES, start(), *program(attempt=1), raw("aot_forward_graph", {}, GRAPH.format(2), attempt=1)
    )  # fmt: skip
    assert [g.kind for g in found.graphs] == ["dynamo", "forward"]


def test_the_dynamic_marks_of_an_input_are_kept() -> None:
    describe, source = tensor("L['x']", 0, [4])
    describe[0]["describe_tensor"]["dynamo_dynamic_indices"] = [0]
    (found,) = records(start(), describe, source)
    assert found.inputs[0].dynamic == '{"dynamo_dynamic_indices": [0]}'


def test_a_folded_tensor_is_numbered_within_its_compile_not_by_the_process() -> None:
    here, there = (
        records(
            *NAMES, start(), *tensor(f"add_{n + 1}", 0, [1]), *tensor(f"eq_{n}", 1, [1]), *tensor("L['eq_6']", 2, [1])
        )
        for n in (6, 11)
    )
    assert here[0].inputs == there[0].inputs
    assert [i.source for i in here[0].inputs] == ["L['eq_6']", "add#0", "eq#1"]
    (twice,) = records(*NAMES, start(), *tensor("eq_6", 0, [1]), *tensor("eq_7", 1, [1]))
    assert len(twice.inputs) == 2


def test_compile_ids_that_begin_again_are_new_compiles() -> None:
    found = records(*NAMES, *program(factor=2), *program(factor=3), *program(factor=4, frame="1/0"))
    assert [(c.compile_id, c.graphs[0].nodes[1].args[1]) for c in found] == [("0/0", "2"), ("0/0", "3"), ("1/0", "4")]


def test_a_lazy_backward_joins_its_compile() -> None:
    code = "# AOT ID: ['0_backward']\nasync_compile = AsyncCompile()\ndef call(args):\n    return args\n"
    found = records(
        *NAMES, *program(frame="0/0"), *program(frame="1/0"),
        raw("aot_backward_graph", {}, GRAPH.format(9), frame="0/0"), raw("inductor_output_code", {}, code, frame="0/0"),
    )  # fmt: skip
    assert [[g.kind for g in c.graphs] for c in found] == [["dynamo", "backward"], ["dynamo"]]
    assert [k.phase for k in found[0].kernels] == ["backward"]


def test_compiled_autograd_is_a_compile_of_its_own() -> None:
    metadata, payload = raw("dynamo_output_graph", {}, GRAPH.format(2))
    found = records(*program(), (metadata | {"compiled_autograd_id": 0}, payload))
    assert [c.compile_id for c in found] == ["0/0", "!0/0/0"]


def test_cache_outcomes_and_recompile_reasons_are_kept() -> None:
    (found,) = records(
        *program(frame="0/1"), artifact("fx_graph_cache_hit", "{}", frame="0/1"),
        artifact("aotautograd_cache_miss", "{}", frame="0/1"),
        artifact("recompile_reasons", json.dumps(["0/0: G['k'] == 2"]), frame="0/1"),
    )  # fmt: skip
    assert found.cache == ("fx_graph_cache_hit", "aotautograd_cache_miss")
    assert found.recompile_reasons == ("0/0: G['k'] == 2",)


def test_a_call_beyond_the_recompile_limit_is_evidence_with_the_frame_it_gave_up() -> None:
    body = {"fail_type": "Unsupported", "fail_reason": "Dynamo recompile limit exceeded\n  Explanation: ..."}
    first, gave_up = records(
        *NAMES, *program(), raw("compilation_metrics", {}),
        artifact("recompile_reasons", json.dumps("0/0: G['k'] == 2"), frame="0/1"),
        raw("compilation_metrics", body, frame="0/1"),
    )  # fmt: skip
    assert (first.limit_reached, gave_up.limit_reached) == (False, True)
    assert (gave_up.function, gave_up.line) == ("forward", first.line)
    assert gave_up.recompile_reasons == ("0/0: G['k'] == 2",)


def test_the_reasons_of_a_recompile_after_a_reset_belong_to_the_new_compile() -> None:
    again = [artifact("recompile_reasons", json.dumps("0/0: G['k'] == 2"), frame="0/1"), *program(frame="0/1"),
             raw("compilation_metrics", {}, frame="0/1")]  # fmt: skip
    assert [len(c.recompile_reasons) for c in records(*again, *again)] == [1, 1]


def test_the_step_is_that_of_the_first_event() -> None:
    events = [e for m, p in program() if (e := event(m, p, phase="train", step=3))]
    assert [c.step for c in compile_records(events, roles={})] == [3]


def test_a_failed_compile_says_why_in_one_line() -> None:
    body = {"fail_reason": "Unsupported at 0x7f0011223344\nmore"}
    assert records(start(), raw("compilation_metrics", body))[0].failure == "Unsupported"
    body = {"fail_reason": "backend='inductor' raised:\nCppCompileError: C++ compile error\nmore"}
    expected = "backend='inductor' raised: CppCompileError: C++ compile error"
    assert records(start(), raw("compilation_metrics", body))[0].failure == expected
    assert records(start(), raw("compilation_metrics", {"fail_reason": None}))[0].failure == ""


def test_a_failed_compile_says_at_which_line_where_torch_does() -> None:
    body = {"fail_reason": "Unsupported", "fail_user_frame_filename": "/app/model.py", "fail_user_frame_lineno": 12}
    assert str(records(start(), raw("compilation_metrics", body))[0].failure_line) == "/app/model.py:12"
    body["fail_user_frame_filename"] = "/venv/lib/python3.12/site-packages/torch/nn/functional.py"
    assert records(start(), raw("compilation_metrics", body))[0].failure_line is None
    assert records(start(), raw("compilation_metrics", {"fail_reason": "boom"}))[0].failure_line is None


BREAK = """\
Graph break in user code at /app/model.py:7
Graph Break Reason: Encountered graph break that we cannot resume from
  Explanation: Dynamo does not know how to trace print
User code traceback:
  File "/app/run.py", line 9, in <module>
    y = model(x)
  File "/app/model.py", line 7, in forward
    print("hi")
"""


def test_a_graph_break_has_reason_explanation_and_the_users_line() -> None:
    (found,) = records(*program(), artifact("dynamo_graph_break_reason", BREAK))
    (found_break,) = found.breaks
    assert found_break.reason.startswith("Encountered") and "trace print" in found_break.reason
    assert found_break.line is not None
    assert (str(found_break.line), found_break.line.code) == ("/app/model.py:7 in forward", 'print("hi")')


def test_a_break_inside_torch_is_blamed_on_the_users_line() -> None:
    text = BREAK.replace("at /app/model.py:7", "at /x/site-packages/torch/nn/m.py:5") + (
        '  File "/x/site-packages/torch/nn/m.py", line 5, in call\n    inner()\n'
    )
    assert str(parse_break(text).line) == "/app/model.py:7 in forward"


def test_the_same_break_of_two_attempts_counts_once() -> None:
    again = [artifact("dynamo_graph_break_reason", BREAK, attempt=n) for n in (0, 1)]
    assert len(records(start(), *again)[0].breaks) == 1


def test_a_file_gives_the_same_records_as_the_live_events(tmp_path: Path) -> None:
    found = [
        *NAMES,
        *program(),
        artifact("recompile_reasons", '["a",\n"b"]'),
        artifact("dynamo_graph_break_reason", BREAK),
    ]
    live = records(*found)
    assert list(from_file(write(tmp_path / "trace.log", *found))) == without_phase(live)


def test_the_payload_of_a_file_is_the_payload_byte_for_byte(tmp_path: Path) -> None:
    for payload in ("one", "one\n", "\n\ttwo\n\n", ""):
        path = write(tmp_path / "trace.log", raw("dynamo_output_graph", {}, payload), *NAMES)
        assert next(iter(read_trace_file(path))).payload == payload


def _events(path: Path) -> list[TraceEvent]:
    return list(read_trace_file(path))


def test_a_last_line_cut_off_by_a_killed_process_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.log", *NAMES, *program())
    whole = _events(path)
    text = path.read_text()
    cut = text.rindex('{"dynamo_cpp_guards_str"') + 30
    path.write_text(text[:cut])
    assert _events(path) == whole[:-1]


def test_a_last_payload_cut_off_by_a_killed_process_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.log", *NAMES, *program()[:-1])
    whole = _events(path)
    text = path.read_text()
    path.write_text(text[: text.index("return (a,)")])
    assert _events(path) == whole[:-1]


def test_foreign_lines_in_a_trace_file_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.log", *NAMES, *program())
    whole = _events(path)
    path.write_text("a warning somebody printed\n\n" + path.read_text() + "{not json}\n")
    assert _events(path) == whole
