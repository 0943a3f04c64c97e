"""Kernels are told from the ranges and copies that the profiler has on the GPU's row as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from tests.gpus import printed_by
from tpcompile.torch_api import profiler


def event(name: str, device_type: DeviceType = DeviceType.CUDA, **more: Any) -> FunctionEvent:
    return FunctionEvent(0, name, 0, 0.0, 10.0, device_type=device_type, **more)


def names(events: list[Any]) -> list[str]:
    return [event.name for event in events]


def profiled(step: Callable[[], Any], *activities: ProfilerActivity) -> list[Any]:
    step()
    with profile(activities=activities) as found:
        step()
    return list(found.events())


def test_ranges_on_the_row_of_the_gpu_and_calls_of_the_host_did_not_run_there() -> None:
    ranges = [event("Torch-Compiled Region: 0/0"), event("## Call CompiledFxGraph"), event("ProfilerStep#1")]
    ranges += [event("nccl:all_reduce"), event("attention", is_user_annotation=True)]
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


ON_GPUS = """
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from tpcompile.torch_api import profiler

dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda:0"))
x, y = torch.ones(4096, device="cuda"), torch.empty(4096, device="cuda")
compiled = torch.compile(lambda: x * 2 + 1)

def step():
    with record_function("users"):
        y.copy_(compiled())
    dist.all_reduce(y)
    torch.cuda.synchronize()

step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
    step()
events = list(found.events())
drawn = [event.name for event in events if "CUDA" in str(event.device_type)]
for event in profiler.on_gpu(events):
    print("kernel" if profiler.is_kernel(event.name) else "copy", event.name)
assert "users" in drawn, drawn
dist.destroy_process_group()
"""


@pytest.mark.gpu(1)
def test_of_a_region_a_copy_and_a_collective_the_ranges_are_no_kernels(tmp_path: Path) -> None:
    printed = printed_by(ON_GPUS, tmp_path)
    kinds = [line.split()[0] for line in printed]
    assert kinds[:2] == ["kernel", "copy"] and len(kinds) <= 3, printed  # a sum of one rank is a copy, or nothing
