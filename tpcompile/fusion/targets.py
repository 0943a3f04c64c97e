"""`package.module:build` -> the manifest of the program, compiled in one process as rank 0 of a job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh

from tpcompile import config
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.fusion.records import Manifest
from tpcompile.gate import target as targets
from tpcompile.ranks.env import RankEnv, check_cpp_compiler, choose_device
from tpcompile.torch_api.simulated import local_ranks


def record(target: str, settings: Sequence[str] = (), *, nproc: int = 1, device: str = "") -> Manifest:
    """Build the target as rank 0 of `nproc`, compile it and call it once.

    Collectives communicate nothing, so the numbers mean nothing; what Inductor generates is what rank 0 of a job gets.
    Raises ConfigError for a target that cannot be built.
    """
    wanted = config.load_target(target, settings)
    place = choose_device(device or "auto", RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1))
    check_cpp_compiler("inductor", place)
    with local_ranks(nproc):
        mesh = init_device_mesh(place.type, (nproc,), mesh_dim_names=("tp",))
        context = targets.TargetContext(rank=0, world_size=nproc, device=place, mesh=mesh, settings=wanted.settings)
        built = targets.target_of(wanted, targets.find(wanted)(context))
        program = built.program if built.is_compiled else torch.compile(built.program)
        with FusionRecorder() as recorder:
            targets.call_target(built, program, built.inputs)
        return recorder.manifest()
