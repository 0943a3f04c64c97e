"""Every private torch API we use is there, has the shape we use, and behaves; each test fails loudly when it moves.

Names are those of `tpcompile/torch_api/compiler.py` and `tpcompile/collectives/api.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx.graph as fx_graph
from torch.distributed._functional_collectives import all_reduce as all_reduce_of_torch
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.collectives import all_reduce
from tpcompile.ranks.domain import mesh_roles
from tpcompile.torch_api import compiler as compat

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def double(x: torch.Tensor) -> torch.Tensor:
    """A small program."""
    return x * 2


def compile_and_run(function=double, x: torch.Tensor | None = None) -> torch.Tensor:
    """Compile with the backend that does no work."""
    return torch.compile(function, backend="eager")(torch.ones(3) if x is None else x)


def test_the_handler_receives_metadata_and_payload_of_every_record() -> None:
    seen: list[tuple[dict[str, Any], str | None]] = []
    with compat.tracing(compat.TraceHandler(lambda metadata, payload: seen.append((metadata, payload)))):
        compile_and_run()
    graphs = [(m, p) for m, p in seen if "dynamo_output_graph" in m]
    assert len(graphs) == 1
    assert {"frame_id": 0, "frame_compile_id": 0, "attempt": 0}.items() <= graphs[0][0].items()
    assert graphs[0][1] is not None and graphs[0][1].startswith("class GraphModule")
    assert {"dynamo_start", "describe_tensor", "describe_source", "dynamo_cpp_guards_str", "compilation_metrics"} <= {
        key for metadata, _ in seen for key in metadata
    }


def test_no_record_arrives_once_the_handler_is_removed() -> None:
    seen: list[object] = []
    with compat.tracing(compat.TraceHandler(lambda *record: seen.append(record))):
        pass
    compile_and_run()
    assert seen == []


def test_an_error_in_the_handler_does_not_break_the_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("parser bug")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    with compat.tracing(compat.TraceHandler(fail)):
        assert compile_and_run().tolist() == [2, 2, 2]


def test_the_string_table_resolves_the_file_of_a_frame() -> None:
    stacks: list[list[dict[str, Any]]] = []

    def receive(metadata: dict[str, Any], _: str | None) -> None:
        if "dynamo_start" in metadata:
            stacks.append(metadata["dynamo_start"]["stack"])

    with compat.tracing(compat.TraceHandler(receive)):
        compile_and_run()
    frame = stacks[0][-1]
    assert (compat.interned_strings()[frame["filename"]], frame["name"]) == (__file__, "double")
    assert frame["line"] == double.__code__.co_firstlineno


def test_the_counters_count_frames_graphs_and_breaks() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    before = compat.dynamo_counters()
    compile_and_run()
    once = compat.dynamo_counters()
    compile_and_run(breaks)
    after = compat.dynamo_counters()
    assert {k: once[k] - before[k] for k in once} == {"frames": 1, "graphs": 1, "breaks": 0}
    assert {k: after[k] - once[k] for k in once} == {"frames": 2, "graphs": 2, "breaks": 1}


def test_settings_off_their_default_are_named_and_places_are_not() -> None:
    with torch._inductor.config.patch(max_autotune=True), torch._dynamo.config.patch(recompile_limit=3):
        found = compat.compile_config()
        assert found["_inductor.config.max_autotune"] == "True"
        assert found["_dynamo.config.recompile_limit"] == "3"
    assert "_inductor.config.max_autotune" not in compat.compile_config()
    assert not any("cache_dir" in key or "debug_dir" in key for key in found)


def test_functions_in_settings_are_equal_in_every_process() -> None:
    def passes() -> list[object]:
        def sink(nodes: object) -> object:
            return nodes

        return ["sink_waits", sink]

    said = []
    for _ in range(2):
        keep = passes()  # another function object each time, as in another process
        with torch._inductor.config.patch(reorder_for_compute_comm_overlap_passes=keep):
            said.append(compat.compile_config()["_inductor.config.reorder_for_compute_comm_overlap_passes"])
        del keep
    assert said[0] == said[1] and "sink" in said[0] and "0x" not in said[0]


def test_the_environment_is_text_only_and_names_the_versions() -> None:
    found = compat.environment()
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in found.items())
    assert found["torch"] == torch.__version__ and found["num_threads"] == str(torch.get_num_threads())


def test_the_environment_is_readable_after_a_precision_was_set_per_backend() -> None:
    matmul, before = torch.backends.mkldnn.matmul, torch.backends.mkldnn.matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        found = compat.environment()
        assert "mkldnn.matmul=bf16" in found["fp32_precision"]
    finally:
        matmul.fp32_precision = before
    assert "mkldnn.matmul=bf16" not in compat.environment()["fp32_precision"]


def test_places_are_no_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in compat.PER_RANK_ENVIRONMENT:
        monkeypatch.setenv(name, "3")
    assert not {f"env {name}" for name in compat.PER_RANK_ENVIRONMENT} & set(compat.environment())


def test_the_attention_backend_follows_what_is_allowed() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    qkv = [torch.zeros(1, 2, 16, 8)] * 3
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            assert compat.sdpa_choice(*qkv, is_causal=True) == backend.name
    mask = torch.zeros(16, 16)
    assert compat.sdpa_choice(*qkv, attn_mask=mask, dropout_p=0.0, scale=None, enable_gqa=False) in {
        "MATH", "FLASH_ATTENTION",
    }  # fmt: skip


def test_autotune_settings_are_resolved_from_patches() -> None:
    with torch._inductor.config.patch(max_autotune=True, max_autotune_gemm_backends="aten,triton"):
        found = compat.autotune_settings()
    assert found["inductor gemm backends"] == "ATEN,TRITON of aten,triton"
    assert found["inductor max_autotune_gemm"] == "True"
    assert compat.autotune_settings()["inductor max_autotune"] == "False"


@pytest.mark.usefixtures("process_group")
def test_the_result_of_a_collective_is_settled_and_a_plain_tensor_is_itself() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(4.0)
    pending = all_reduce(x, "sum", group)
    settled = compat.settled(pending)
    assert type(pending) is AsyncCollectiveTensor and type(settled) is torch.Tensor
    assert torch.equal(settled, x) and compat.settled(x) is x


@pytest.mark.usefixtures("process_group")
def test_groups_of_a_mesh_have_the_axis_as_their_role() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    assert mesh_roles(mesh) == {mesh.get_group("tp").group_name: "tp"}


@pytest.mark.usefixtures("process_group")
def test_a_group_without_a_description_has_its_size_as_role() -> None:
    group = dist.new_group([0])
    assert compat.group_roles()[group.group_name] == "1 ranks"


@pytest.mark.usefixtures("process_group")
def test_two_groups_of_the_same_ranks_have_two_roles() -> None:
    first, second, third = dist.new_group([0]), dist.new_group([0]), dist.new_group([0], group_desc="tp")
    roles = compat.group_roles()
    assert [roles[group.group_name] for group in (first, second, third)] == ["1 ranks", "1 ranks #2", "tp"]


def test_without_a_process_group_there_are_no_roles() -> None:
    assert compat.group_roles() == {}


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("all_reduce", ["input", "reduce_op", "group_name"]),
        ("all_gather_into_tensor", ["input", "group_size", "group_name"]),
        ("reduce_scatter_tensor", ["input", "reduce_op", "group_size", "group_name"]),
        ("wait_tensor", ["tensor"]),
    ],
)
def test_functional_collectives_have_the_signature_we_call(op: str, arguments: list[str]) -> None:
    schema = getattr(torch.ops._c10d_functional, op).default._schema
    assert [argument.name for argument in schema.arguments] == arguments


@pytest.mark.usefixtures("process_group")
def test_a_group_is_found_by_its_name() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group


@pytest.mark.usefixtures("process_group")
def test_functional_collectives_compute() -> None:
    group = dist.group.WORLD
    assert group is not None
    ops, x = torch.ops._c10d_functional, torch.arange(4.0)
    for result in (
        ops.all_reduce(x, "sum", group.group_name),
        ops.all_gather_into_tensor(x, 1, group.group_name),
        ops.reduce_scatter_tensor(x, "sum", 1, group.group_name),
    ):
        assert torch.equal(ops.wait_tensor(result), x)


def test_the_traced_code_is_known_when_the_graph_is_logged_and_gone_after() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    seen: list[list[str]] = []

    def receive(metadata: dict[str, Any], _: str | None) -> None:
        if "dynamo_output_graph" in metadata:
            seen.append([code.co_name for code in compat.traced_code()])

    with compat.tracing(compat.TraceHandler(receive)):
        compile_and_run(outer)
    assert seen == [["outer", "inner"]] and compat.traced_code() == []


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """Rank 0 of two; no process runs rank 1: enough to trace a collective, which a group of one would leave out."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def reduced_by_torch(x: torch.Tensor) -> torch.Tensor:
    """A collective of torch, in a line of the user's."""
    return all_reduce_of_torch(x * 2, "sum", dist.group.WORLD) + 1


def reduced_by_us(x: torch.Tensor) -> torch.Tensor:
    """A collective of our wrappers, in a line of the user's."""
    group = dist.group.WORLD
    return all_reduce(x * 2, group=group) + 1


def printed_files(function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, set[str]]:
    """Event -> files of the lines in the graph it prints."""
    found: dict[str, set[str]] = {}

    def receive(metadata: dict[str, Any], payload: str | None) -> None:
        for event in metadata:
            if event == "dynamo_output_graph" or (event.startswith("aot_") and event.endswith("_graph")):
                found[event] = set(re.findall(r"File: (\S+?):\d+ in ", payload or ""))

    with compat.tracing(compat.TraceHandler(receive)):
        torch.compile(function, backend="aot_eager")(torch.ones(3, requires_grad=True)).sum().backward()
    return found


EVENTS = {"dynamo_output_graph", "aot_joint_graph", "aot_forward_graph", "aot_backward_graph"}


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("function", [reduced_by_torch, reduced_by_us])
def test_printed_graphs_name_the_users_line_for_a_collective(function: Any) -> None:
    with compat.users_lines():
        found = printed_files(function)
    assert set(found) == EVENTS
    assert set().union(*found.values()) == {__file__}


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize(
    ("function", "library"),
    [
        (reduced_by_torch, "/torch/distributed/_functional_collectives.py"),
        (reduced_by_us, "/tpcompile/torch_api/c10d.py"),
    ],
)
@pytest.mark.parametrize("event", ["dynamo_output_graph", "aot_forward_graph"])
def test_without_it_they_name_the_line_inside_of_the_collective(function: Any, library: str, event: str) -> None:
    assert any(file.endswith(library) for file in printed_files(function)[event])


STACK = """
  File "/app/train.py", line 9, in step
    y = reduce(x)
  File "/venv/lib/python3.11/site-packages/torch/distributed/_functional_collectives.py", line 179, in all_reduce
    tensor = torch.ops._c10d_functional.all_reduce(
"""
OF_TORCH = STACK[STACK.index('  File "/venv') :]


def test_a_stack_of_library_code_only_keeps_its_innermost_line() -> None:
    with compat.users_lines():
        mixed, only = fx_graph._parse_stack_trace(STACK), fx_graph._parse_stack_trace(OF_TORCH)
    assert mixed is not None and mixed.file == "/app/train.py"
    assert only is not None and only.file.endswith("_functional_collectives.py")


def test_a_caller_that_filters_frames_itself_gets_what_it_asks_for() -> None:
    with compat.users_lines():
        found = fx_graph._parse_stack_trace(STACK, lambda file, name, code: name == "all_reduce")
    assert found is not None and found.file.endswith("_functional_collectives.py")


def test_torchs_own_lines_are_back_after_the_last_of_nested_users() -> None:
    before = fx_graph._parse_stack_trace
    with compat.users_lines():
        with compat.users_lines():
            assert fx_graph._parse_stack_trace(STACK).file == "/app/train.py"
        assert fx_graph._parse_stack_trace(STACK).file == "/app/train.py"
    assert fx_graph._parse_stack_trace is before


def test_torchs_own_lines_are_back_after_an_exception() -> None:
    before = fx_graph._parse_stack_trace
    with pytest.raises(ValueError, match="planted"), compat.users_lines():
        raise ValueError("planted")
    assert fx_graph._parse_stack_trace is before


def test_torchs_own_lines_are_back_whichever_user_ends_first() -> None:
    before = fx_graph._parse_stack_trace
    first, second = compat.users_lines(), compat.users_lines()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    still = fx_graph._parse_stack_trace(STACK)
    second.__exit__(None, None, None)
    after = fx_graph._parse_stack_trace
    fx_graph._parse_stack_trace = before
    assert still is not None and still.file == "/app/train.py"
    assert after is before


def _refuses(graph: object, inputs: object) -> object:
    raise RuntimeError("no")


def test_an_exception_of_a_compile_says_which_one_and_what_was_traced() -> None:
    """A backend that raises leaves no lines, an op that cannot be traced does."""
    torch.compiler.reset()
    with pytest.raises(Exception) as of_backend:
        torch.compile(torch.sin, backend=_refuses)(torch.ones(2))
    assert compat.failed_compile(of_backend.value) == ("0/0", ())
    with pytest.raises(Exception) as of_op:
        torch.compile(lambda x: x @ torch.ones(3, 4), backend="eager")(torch.ones(2))
    (line,) = compat.failed_compile(of_op.value).stack
    assert "x @ torch.ones(3, 4)" in line.code
    assert compat.failed_compile(ValueError()) == ("", ())
