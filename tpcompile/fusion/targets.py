"""`package.module:build` -> the manifest of the program, compiled in one process as rank 0 of a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.errors import ConfigError
from tpcompile.fusion import resources
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.recorder import FusionRecorder, devices_of
from tpcompile.ranks.env import RankEnv, check_cpp_compiler, choose_device
from tpcompile.target import Target, build, call_target, raised_by
from tpcompile.torch_api import no_gpu
from tpcompile.torch_api.generated import generating_backend, static_shapes, uncompiled_kernels, without_caches
from tpcompile.torch_api.passes import CustomGraphPass, tree_leaves
from tpcompile.torch_api.simulated import local_ranks


@dataclass(frozen=True)
class Variant:
    """How a program is compiled in an attempt of `tpcompile fusion bisect`."""

    graph_pass: CustomGraphPass | None = None
    is_static: bool = False


@dataclass(frozen=True)
class _Compile:
    device: torch.device
    compiled: Callable[[Any], Any]
    building: AbstractContextManager[Any]
    variant: Variant | None = None


def record(target: str, settings: Sequence[str] = (), *, nproc: int = 1, device: str = "auto") -> Manifest:
    """Build the target as rank 0 of `nproc`, compile it and call it once.

    Collectives communicate nothing, so the numbers mean nothing; what Inductor generates is what rank 0 of a job gets.
    Caches of torch.compile are not used: for code from a cache, which a gate may have left there, nothing is known of
    why it was not fused. Raises ConfigError for a target that cannot be built, or is on a different device.
    """
    place = place_of(device)
    check_cpp_compiler("inductor", place)
    return _recorded(target, settings, nproc, _Compile(place, torch.compile, nullcontext()))


def record_without_gpu(
    target: str, settings: Sequence[str] = (), *, nproc: int = 1, with_resources: bool = False
) -> Manifest:
    """As `record`, for the GPU that `tpcompile.fusion.no_gpu.pretend` has made torch see; tensors hold nothing.

    `with_resources` compiles the kernels too.
    """
    how = _Compile(torch.device("cuda"), _generating(Variant()), no_gpu.empty_tensors())
    with resources.generated_codes() as codes:
        found = _recorded(target, settings, nproc, how)
    return resources.with_compiled(found, codes) if with_resources else found


def record_variant(
    target: str, settings: Sequence[str], variant: Variant, *, nproc: int, device: str, arch: str = ""
) -> Manifest:
    """The manifest of a rewritten program; its code is not run. With `arch`, for the GPU of `no_gpu.pretend`.

    Raises ConfigError for a target that is compiled already.
    """
    place = torch.device("cuda") if arch else place_of(device)
    tensors = no_gpu.empty_tensors() if arch else nullcontext()
    generating = _generating(variant)
    how = _Compile(place, generating, tensors, variant)
    torch.compiler.reset()
    with uncompiled_kernels():
        return _recorded(target, settings, nproc, how)


def place_of(device: str) -> torch.device:
    """`auto`, `cpu` or `cuda` -> the device of a job's only process. Raises PreflightError where there is none."""
    return choose_device(device, RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1))


def _generating(variant: Variant) -> Callable[[Any], Any]:
    """Code is generated, and the graphs run as they were."""
    return lambda program: torch.compile(program, backend=generating_backend(variant.graph_pass))


def built_on(
    device: torch.device, target: str, settings: Sequence[str], *, nproc: int, building: AbstractContextManager[Any]
) -> Target:
    """The target as rank 0 builds it, inside of `local_ranks(nproc)`.

    Raises ConfigError where that cannot be, or where it is built on a different device.
    """
    mesh = init_device_mesh(device.type, (nproc,), mesh_dim_names=("tp",))
    with building:
        built = build(target, settings, rank=0, device=device, mesh=mesh)
    _check_device(target, {tensor.device.type for tensor in _tensors(built)}, device)
    return built


def _tensors(built: Target) -> Iterator[torch.Tensor]:
    program = built.program
    if isinstance(program, nn.Module):
        yield from program.parameters()
        yield from program.buffers()
    yield from (leaf for leaf in tree_leaves(built.inputs) if isinstance(leaf, torch.Tensor))


def _check_device(target: str, devices: Collection[str], wanted: torch.device) -> None:
    """Raise ConfigError where a program is on other devices, and none of it on `wanted`."""
    if devices and wanted.type not in devices:
        found = " and ".join(sorted(devices))
        raise ConfigError(
            f"{target} is on {found}, and {wanted.type} was asked for: in {target.partition(':')[2]}, make weights and "
            "inputs on ctx.device"
        )


def _recorded(target: str, settings: Sequence[str], nproc: int, how: _Compile) -> Manifest:
    with local_ranks(nproc):
        built = built_on(how.device, target, settings, nproc=nproc, building=how.building)
        if how.variant is not None and built.is_compiled:
            raise ConfigError(f"{target} is compiled already; bisect compiles it itself, each time differently")
        program = built.program if built.is_compiled else how.compiled(built.program)
        is_static = how.variant is not None and how.variant.is_static
        shapes = static_shapes(built.inputs) if is_static else nullcontext()
        with without_caches(), FusionRecorder() as recorder, how.building, shapes, raised_by(target):
            call_target(built, program, built.inputs)
        found = recorder.manifest()
        _check_device(target, devices_of(found.graphs), how.device)
        return found
