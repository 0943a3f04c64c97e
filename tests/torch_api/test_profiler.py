"""Kernels are told from the ranges and copies that the profiler has on the GPU's row as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from tpcompile.torch_api import profiler


def event(name: str, device_type: DeviceType = DeviceType.CUDA) -> FunctionEvent:
    return FunctionEvent(0, name, 0, 0.0, 10.0, device_type=device_type)


def names(events: list[Any]) -> list[str]:
    return [event.name for event in events]


def profiled(step: Callable[[], Any], *activities: ProfilerActivity) -> list[Any]:
    step()
    with profile(activities=activities) as found:
        step()
    return list(found.events())


def test_ranges_on_the_row_of_the_gpu_and_calls_of_the_host_did_not_run_there() -> None:
    ranges = [event("Torch-Compiled Region: 0/0"), event("## Call CompiledFxGraph"), event("ProfilerStep#1")]
    host = event("aten::mm", DeviceType.CPU)
    assert names(profiler.on_gpu([*ranges, event("gemm"), host, event("Memcpy DtoD")])) == ["gemm", "Memcpy DtoD"]


def test_copies_and_fills_are_no_kernels() -> None:
    ran = ["gemm", "Memcpy DtoD (Device -> Device)", "Memset (Device)", "triton_poi_fused_0"]
    assert list(filter(profiler.is_kernel, ran)) == ["gemm", "triton_poi_fused_0"]


@pytest.mark.slow
def test_torch_names_a_compiled_region_and_its_graph_so() -> None:
    found = names(profiled(torch.compile(lambda: torch.ones(8) * 2), ProfilerActivity.CPU))
    assert sum(name.startswith(profiler.REGION) for name in found) == 1
    assert any(name.startswith("## Call CompiledFxGraph") for name in found)


@pytest.mark.gpu(1)
def test_one_kernel_and_one_copy_of_a_compiled_region_on_a_gpu() -> None:
    x, y = torch.ones(4096, device="cuda"), torch.empty(4096, device="cuda")
    compiled = torch.compile(lambda: x * 2 + 1)

    def step() -> None:
        with record_function("ProfilerStep"):
            y.copy_(compiled())
        torch.cuda.synchronize()

    found = names(profiler.on_gpu(profiled(step, ProfilerActivity.CPU, ProfilerActivity.CUDA)))
    assert [profiler.is_kernel(name) for name in found] == [True, False]
