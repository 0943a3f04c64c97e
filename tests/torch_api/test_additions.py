"""What a program adds to torch's compiler is read where torch keeps it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.codegen.common
import torch._inductor.decomposition
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.lowering
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor import config
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    fwd_only,
    register_graph_pattern,
    register_replacement,
)

from tpcompile.torch_api import additions, makers
from tpcompile.torch_api.compiler import TraceHandler, tracing

SILU = torch.ops.aten.silu.default


def mine(*args: Any) -> Any:
    return args


def replaces(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def at_graph() -> Iterator[Callable[[Any, Any], list[Any]]]:
    """(program, backend) -> what `read` returns while the graph of Dynamo is new."""

    def compiled(program: Any, read: Callable[[], Any], **options: Any) -> list[Any]:
        found = []

        def receive(metadata: dict[str, Any], payload: str | None) -> None:
            if "dynamo_output_graph" in metadata:
                found.append(read())

        torch.compiler.reset()
        with tracing(TraceHandler(receive)):
            torch.compile(program, **options)(torch.ones(4))
        return found

    yield compiled


def made_in_settings() -> dict[str, Any]:
    found = {name: makers.made_by_others(value) for name, value in additions.settings(additions.backend())}
    return {name: made for name, made in found.items() if made}


@pytest.mark.parametrize(
    "name",
    [
        "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
        "pre_grad_custom_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass", "custom_partitioner_fn",
        "inductor_choices_class", "bucket_all_reduces_fx_bucket_size_determinator",
        "aten_distributed_optimizations.custom_runtime_estimation",
    ],
)  # fmt: skip
def test_each_setting_that_takes_a_function_is_read(name: str) -> None:
    with config.patch({name: mine}):
        assert made_in_settings() == {f"torch._inductor.config.{name}": [mine]}
    assert made_in_settings() == {}


def test_lists_of_passes_and_the_settings_of_aotautograd_are_read() -> None:
    with config.patch(_fuse_ddp_communication_passes=["fuse_ddp_with_concat_op", mine]):
        assert list(made_in_settings().values()) == [[mine]]
    with torch._functorch.config.patch(joint_custom_pass=mine):
        assert made_in_settings() == {"torch._functorch.config.joint_custom_pass": [mine]}
    with config.patch({"trace.upload_tar": mine}):  # it is told about a compile, and changes none
        assert made_in_settings() == {}


def test_a_pass_in_the_options_of_one_compile_is_read_before_it_runs(at_graph: Any) -> None:
    (found,) = at_graph(
        lambda x: x @ x, made_in_settings, options={"post_grad_custom_post_pass": mine}, backend="inductor"
    )
    assert found == {"torch._inductor.config.post_grad_custom_post_pass": [mine]}


def test_the_backend_is_read(at_graph: Any) -> None:
    def own(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return graph

    def backend() -> Any:
        return makers.made_by_others(additions.backend())

    assert at_graph(torch.sin, backend, backend=own) == [[own]]
    for name in ("eager", "aot_eager", "aot_eager_decomp_partition"):
        assert at_graph(torch.sin, backend, backend=name) == [[]]
    assert additions.backend() is None


@pytest.mark.parametrize(
    ("backend", "modules"),
    [
        ("eager", ()),
        ("aot_eager", ("torch._functorch.",)),
        ("cudagraphs", ("torch._functorch.",)),
        ("inductor", ("torch.",)),
        (aot_autograd(fw_compiler=boxed_nop), ("torch.",)),  # torch's wrapper, of any compiler
        (lambda graph, inputs: graph, ("torch.",)),  # may call Inductor
    ],
)
def test_a_backend_uses_the_settings_and_tables_of_what_it_runs(at_graph: Any, backend: Any, modules: Any) -> None:
    assert at_graph(lambda x: x @ x, lambda: additions.used_by(additions.backend()), backend=backend) == [modules]


def test_what_a_backend_does_not_use_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch._inductor.lowering.lowerings, SILU, mine)
    monkeypatch.setitem(torch._inductor.decomposition.decompositions, SILU, mine)
    with config.patch(joint_custom_pre_pass=mine), torch._functorch.config.patch(joint_custom_pass=mine):
        found = {name: read(lookup_backend(name)) for name in ("eager", "aot_eager", "aot_eager_decomp_partition")}
    aot, decomposed = "torch._functorch.config.joint_custom_pass", "torch._inductor.decomposition.decompositions"
    assert found == {"eager": set(), "aot_eager": {aot}, "aot_eager_decomp_partition": {aot, decomposed}}


def read(backend: Any) -> set[str]:
    """Settings and tables of this backend with a function of others."""
    in_settings = {name for name, value in additions.settings(backend) if makers.made_by_others(value)}
    return in_settings | {table for table, _, _ in additions.tables(backend)}


def test_tables_of_ops_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(additions.tables(None)) == []
    monkeypatch.setitem(torch._inductor.lowering.lowerings, SILU, mine)
    monkeypatch.setitem(torch._inductor.decomposition.decompositions, SILU, mine)
    monkeypatch.setitem(torch._decomp.decomposition_table, SILU, mine)
    assert {(table, op, made) for table, op, made in additions.tables(None)} == {
        ("torch._inductor.lowering.lowerings", "aten.silu.default", mine),
        ("torch._inductor.decomposition.decompositions", "aten.silu.default", mine),
        ("torch._decomp.decomposition_table", "aten.silu.default", mine),
    }


def test_patterns_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(additions.patterns(None)) == []
    passes = post_grad.pass_patterns[1]
    monkeypatch.setattr(passes, "patterns", passes.patterns.copy())
    register_graph_pattern(CallFunction(SILU, KeywordArg("x")), pass_dict=passes)(mine)
    assert ("torch._inductor.fx_passes.post_grad", mine) in list(additions.patterns(None))
    register_replacement(lambda x: x.sin().cos(), replaces, [torch.ones(2)], fwd_only, passes)
    assert ("torch._inductor.fx_passes.post_grad", replaces) in list(additions.patterns(None))


def test_there_are_no_patterns_before_their_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.pattern_matcher")
    assert list(additions.patterns(None)) == []
