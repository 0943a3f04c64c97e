"""What of a profile is a kernel, communication, and communication that nothing hides."""

from __future__ import annotations

from tpcompile.bench.step import Span, summary


def test_only_the_part_that_no_other_kernel_overlaps_is_exposed() -> None:
    spans = [
        Span(0, 100, "gemm"),
        Span(80, 200, "ncclDevKernel_AllReduce_Sum"),
        Span(120, 140, "triton_poi_fused_gelu"),
        Span(190, 230, "one_shot_all_reduce_kernel"),
        Span(225, 240, "Memcpy DtoD"),
    ]
    found = summary(spans, ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "aten::mm"], num_steps=1)
    assert (found.kernels, found.launches) == (4, 3)
    assert found.busy_ms == 0.24
    assert found.communication_ms == 0.15
    assert found.exposed_ms == (20 + 85) / 1e3  # 100 to 120, 140 to 225


def test_it_is_of_one_step() -> None:
    found = summary([Span(at, at + 10, "gemm") for at in (0, 100, 200)], ["cudaGraphLaunch"] * 3, num_steps=3)
    assert (found.kernels, found.launches, found.busy_ms, found.exposed_ms) == (1, 1, 0.01, 0.0)
