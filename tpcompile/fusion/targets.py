"""`package.module:build` -> the manifest of the program, compiled in one process as rank 0 of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tpcompile import config
from tpcompile.fusion import resources
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.fusion.records import Manifest
from tpcompile.gate import target as targets
from tpcompile.ranks.env import RankEnv, check_cpp_compiler, choose_device
from tpcompile.torch_api import no_gpu
from tpcompile.torch_api.simulated import local_ranks


def record(target: str, settings: Sequence[str] = (), *, nproc: int = 1, device: str = "auto") -> Manifest:
    """Build the target as rank 0 of `nproc`, compile it and call it once.

    Collectives communicate nothing, so the numbers mean nothing; what Inductor generates is what rank 0 of a job gets.
    Raises ConfigError for a target that cannot be built.
    """
    place = choose_device(device, RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1))
    check_cpp_compiler("inductor", place)
    return _recorded(target, settings, nproc, place, torch.compile, nullcontext())


def record_without_gpu(
    target: str, settings: Sequence[str] = (), *, nproc: int = 1, with_resources: bool = False
) -> Manifest:
    """The same for the GPU that `tpcompile.fusion.no_gpu.pretend` has made torch see; tensors hold nothing.

    `with_resources` compiles the kernels too.
    """

    def compiled(program: Any) -> Any:
        return torch.compile(program, backend=no_gpu.generating_backend())

    with torch.compiler.config.patch(force_disable_caches=True), resources.generated_codes() as codes:
        found = _recorded(target, settings, nproc, torch.device("cuda"), compiled, no_gpu.empty_tensors())
    return resources.with_compiled(found, codes) if with_resources else found


def _recorded(
    target: str,
    settings: Sequence[str],
    nproc: int,
    device: torch.device,
    compiled: Callable[[Any], Any],
    building: AbstractContextManager[Any],
) -> Manifest:
    wanted = config.load_target(target, settings)
    with local_ranks(nproc):
        mesh = init_device_mesh(device.type, (nproc,), mesh_dim_names=("tp",))
        context = targets.TargetContext(rank=0, world_size=nproc, device=device, mesh=mesh, settings=wanted.settings)
        build = targets.find(wanted)
        with building:
            built = targets.target_of(wanted, build(context))
        program = built.program if built.is_compiled else compiled(built.program)
        with FusionRecorder() as recorder, building:
            targets.call_target(built, program, built.inputs)
        return recorder.manifest()
