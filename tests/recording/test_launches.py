"""Numbers of kernels become names while they are this process's own, and are left alone in text from a cache."""

from __future__ import annotations

import pytest
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from tpcompile.evidence.compiles.events import event
from tpcompile.fastpath.source import source_of
from tpcompile.recording.foreign import Launches

kernels = pytest.importorskip("tests.fastpath.kernels")  # needs Triton


def named(launches: Launches, kind: str, compile_id: int = 0) -> str:
    """The text of a graph with one launch, as the capture keeps it."""
    kernel_side_table.reset_table()
    number = kernel_side_table.add_kernel(kernels.norm_kernel)
    constants = kernel_side_table.add_constant_args({"SIZE": 4, "other": object()})
    text = f"triton_kernel_wrapper_mutation(kernel_idx = {number}, constant_args_idx = {constants}, grid = [(1, 1, 1)])"
    found = event({kind: {}, "frame_id": 0, "frame_compile_id": compile_id}, text)
    assert found is not None
    return launches.named(found).payload


NAMED = "kernel = 'tests.fastpath.kernels.norm_kernel', constants = 'SIZE=4, other=object', grid"


def test_a_launch_in_a_graph_of_dynamo_has_the_name_and_the_constants_of_its_kernel() -> None:
    launches = Launches()
    assert NAMED in named(launches, "dynamo_output_graph")
    assert launches.sources["tests.fastpath.kernels.norm_kernel"] == source_of(kernels.norm_kernel).sha256


@pytest.mark.parametrize("outcome", ["miss", "bypass"])
def test_a_lowered_graph_of_this_process_has_them_too(outcome: str) -> None:
    launches = Launches()
    cache = event({"artifact": {"name": f"aotautograd_cache_{outcome}"}, "frame_id": 0, "frame_compile_id": 0}, "{}")
    assert cache is not None
    launches.named(cache)
    assert NAMED in named(launches, "aot_forward_graph")
    assert NAMED not in named(launches, "aot_forward_graph", compile_id=1)


def test_the_numbers_of_a_cached_graph_are_those_of_a_different_process() -> None:
    assert "kernel_idx = 0" in named(Launches(), "aot_forward_graph")
